"""The job of the case `goodput` with the library.

goodput_ours.py FOLDER SCHEDULE SAVE_EVERY IN_MEMORY_EVERY
"""

import torch

import torchmuster.train as tm
from training.killing import (
    Diary,
    build_dataset,
    build_model,
    build_optimizer,
    cross_entropy,
    read_arguments,
)


def main() -> None:
    """Train to the end of the schedule."""
    folder, schedule, save_every, in_memory_every = read_arguments()
    torch.set_num_threads(1)
    world = tm.init()
    model = world.wrap(build_model())
    optimizer = build_optimizer(model)
    data = world.loader(build_dataset(schedule), batch_size=schedule.batch_size, shuffle=True)
    run = world.resume(
        model=model,
        optimizer=optimizer,
        data=data,
        folder=str(folder / "snapshots"),
        every_steps=save_every,
        memory_every_steps=in_memory_every,
    )
    diary = Diary(folder, schedule, world.rank)
    for _ in run.epochs(schedule.num_epochs):
        for x, y in data:
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
            diary.note(run.steps_done)


if __name__ == "__main__":
    main()
