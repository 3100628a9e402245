"""The job of `goodput.py` with the library.

goodput_ours.py FOLDER WORK SAVE_EVERY IN_MEMORY_EVERY
"""

import torch

import torchmuster.train as tm
from training.useful import (
    BATCH_SIZE,
    Diary,
    build_dataset,
    build_model,
    build_optimizer,
    cross_entropy,
    read_arguments,
    wait_for_device,
)


def main() -> None:
    """Train to the end of the schedule."""
    folder, work, save_every, in_memory_every = read_arguments()
    torch.set_num_threads(1)
    world = tm.init()
    model = world.wrap(build_model())
    optimizer = build_optimizer(model)
    data = world.loader(build_dataset(work), batch_size=BATCH_SIZE, shuffle=True)
    run = world.resume(
        model=model,
        optimizer=optimizer,
        data=data,
        folder=str(folder / "snapshots"),
        every_steps=save_every,
        memory_every_steps=in_memory_every,
    )
    diary = Diary(folder, world.rank)
    for _ in run.epochs(work.num_epochs):
        for x, y in data:
            loss = cross_entropy(model(x), y)
            loss.backward()
            wait_for_device(work)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
            diary.note(run.steps_done)


if __name__ == "__main__":
    main()
