"""Advice that names what the log shows: sizes, names, the user's line, the framework; and that is silent where it shows nothing."""

from pathlib import Path

import pytest

from kit.tables import rows
from torchmuster.diagnose.explain import rules
from torchmuster.diagnose.explain.advice import VALUES
from unit.diagnose.explain.logs import explain, steps, traceback_of

SITE = "/opt/env/lib/python3.11/site-packages"
IN_A_LAYER = f"{SITE}/torch/nn/modules/linear.py"
IN_GPT2 = f"{SITE}/transformers/models/gpt2/modeling_gpt2.py"
IN_THE_TRAINER = f"{SITE}/transformers/trainer.py"
_OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.63 GiB. GPU 0 has a total capacity of 79.19 GiB of which"
    " 2.61 GiB is free. {others}Including non-PyTorch memory, this process has {own} GiB memory in use. Of the allocated memory"
    " {allocated} GiB is allocated by PyTorch, and {unused} GiB is reserved by PyTorch but unallocated."
)
INDEX = "IndexError: index out of range in self"
PRODUCT = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x784 and 512x10)"
LONG = "Token indices sequence length is longer than the specified maximum sequence length for this model (1530 > 1024).\n"


def full(others="", own="76.50", allocated="74.10", unused="1.90"):
    given = {"others": others, "own": own, "allocated": allocated, "unused": unused}
    return _OUT_OF_MEMORY.format(**given)


FULL = full()


def raised(error, *library_files, file="/home/u/fit.py", code="step(batch)", line=31, before=""):
    """Return a log of an exception that goes from the user's line through files of libraries."""
    frames = "".join(f'  File "{path}", line 7, in call\n    call()\n' for path in library_files)
    return before + traceback_of(frames + error, file=file, line=line, function="main", code=code)


def advice(folder, log):
    return explain(folder, job=log).first.hint


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (IN_THE_TRAINER, "gradient_accumulation_steps"),
        (f"{SITE}/vllm/worker/worker.py", "--max-model-len"),
        (f"{SITE}/sglang/srt/managers/scheduler.py", "--mem-fraction-static"),
        (f"{SITE}/deepspeed/runtime/engine.py", "offload_optimizer"),
        (f"{SITE}/lightning/pytorch/trainer/trainer.py", "accumulate_grad_batches"),
        (f"{SITE}/torch/nn/parallel/data_parallel.py", "torchrun"),
        (IN_A_LAYER, "76.5 GiB of 79.2 GiB are this process's own"),
    ],
)
def test_a_full_gpu_gets_the_settings_of_the_framework_that_filled_it(tmp_path, library, words):
    assert words in advice(tmp_path, raised(FULL, library))


def test_the_framework_of_the_traceback_counts_more_than_one_that_the_log_names(tmp_path):
    log = raised(FULL, IN_THE_TRAINER, before="installed: vllm 0.8.1\n")
    assert "per_device_train_batch_size" in advice(tmp_path, log)


@pytest.mark.parametrize(
    ("others", "words", "is_told"),
    [
        ("Process 4123 has 66.00 GiB memory in use. ", "process 4123 (66.0 GiB)", True),
        ("Process 1 has 17179869184.00 GiB memory in use. ", "17179869184", False),
    ],
    ids=["one that fills it", "one with more than the GPU has"],
)
def test_another_process_on_the_gpu_is_named(tmp_path, others, words, is_told):
    log = raised(full(others, own="10.0", allocated="9.0", unused="0.5"))
    assert (words in advice(tmp_path, log)) == is_told


@pytest.mark.parametrize(
    ("allocated", "unused", "is_advised"), [("74.1", "1.90", False), ("46.0", "30.00", True)]
)
def test_expandable_segments_are_for_memory_that_is_reserved_and_unused(
    tmp_path, allocated, unused, is_advised
):
    log = raised(full(allocated=allocated, unused=unused))
    assert ("expandable_segments" in advice(tmp_path, log)) == is_advised


def test_a_gpu_that_is_full_before_anything_is_loaded_needs_no_smaller_batch(tmp_path):
    frame = f'  File "{SITE}/torch/cuda/__init__.py", line 476, in set_device\n    torch._C._cuda_setDevice(device)\n'
    error = "torch.AcceleratorError: CUDA error: out of memory"
    log = raised(frame + error, code="torch.cuda.set_device(0)")
    assert "nvidia-smi" in advice(tmp_path, log)
    assert "which other process" not in advice(tmp_path, steps(0, 9) + log)


def test_a_gpu_that_fills_late_is_said_to_have_been_large_enough_before(tmp_path):
    log = raised(FULL, IN_A_LAYER, before=steps(9000, 9281))
    assert "up to step 9280" in advice(tmp_path, log)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        *(
            (raised(error), words)
            for words, error in rows(
                r"""
            30 entries are no multiple of 8  RuntimeError: shape '[8, -1]' is invalid for input of size 30
            at least 11 classes              IndexError: Target 10 is out of bounds.
            the indices 0 to 3               IndexError: index 4 is out of bounds for dimension 0 with size 4
            removeprefix('module.')          RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "fc.weight".\n\tUnexpected key(s) in state_dict: "module.fc.weight".
            resize_token_embeddings(50265)   RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for wte.weight: copying a param with shape torch.Size([50257, 16]) from checkpoint, the shape in current model is torch.Size([50265, 16]).
            96 or 128                        AssertionError: global batch size (100) is not divisible by micro batch size (4) times data parallel size (8)
            "train_batch_size": 48           AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 64 != 4 * 2 * 6
            """
            )
        ),
        (raised(PRODUCT, IN_A_LAYER), "in_features=784"),
        (raised(INDEX, IN_GPT2, code="h = self.wpe(position_ids)", before=LONG), "max_length=1024"),
    ],
)
def test_advice_has_the_numbers_of_the_message(tmp_path, log, words):
    assert words in advice(tmp_path, log)


SIZES = "RuntimeError: The size of tensor a (1024) must match the size of tensor b (512) at non-singleton dimension 1"
DEVICES = "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
SOME_KEYS = 'RuntimeError: Error(s) in loading state_dict for Net:\n\tUnexpected key(s) in state_dict: "module.fc.weight", "head.weight".'
PART_B = "FileNotFoundError: [Errno 2] No such file or directory: '/data/part_b.json'"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        # No layer is in the traceback: the product is the program's own.
        (raised(PRODUCT), "in_features=784"),
        # Nothing in the line is about positions.
        (raised(SIZES, code="loss = pred - target"), "max_length"),
        # The table that was too small is not that of the positions, whatever a tokenizer has warned of.
        (raised(INDEX, code="h = self.wte(input_ids)", before=LONG), "1024"),
        # The line makes its tensor where the other one is.
        (raised(DEVICES, code="x = x * torch.ones(3, device=x.device)"), "torch.ones makes"),
        # Some keys only have the prefix.
        (raised(SOME_KEYS), "removeprefix"),
        # A module of the program's own: nobody knows it on PyPI.
        (raised("ModuleNotFoundError: No module named 'my_models'"), "pip install my_models"),
        # Files of a series differ in a letter: the other one is not meant.
        (raised(PART_B, before="read /data/part_a.json\n"), "part_a"),
        # An assert of another program than Megatron.
        (raised("AssertionError", code="assert num_samples > 0"), "--split"),
    ],
)
def test_what_the_log_does_not_show_is_not_advised(tmp_path, log, words):
    assert words not in advice(tmp_path, log)


def test_advice_for_code_names_the_line_and_what_stands_there(tmp_path):
    log = raised("KeyError: 'labels'", code='loss = batch["labels"]', line=88)
    assert advice(tmp_path, log).endswith('(at fit.py:88, `loss = batch["labels"]`)')


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("cv2", "pip install opencv-python-headless "),
        ("sklearn.metrics", "pip install scikit-learn "),
        ("yaml", "pip install PyYAML "),
        ("transformers", "pip install transformers "),
        ("flash_attn", "pip install flash-attn --no-build-isolation "),
        ("apex", "pip install git+https://github.com/NVIDIA/apex --no-build-isolation "),
    ],
)
def test_a_missing_module_is_installed_under_the_name_that_pip_knows(tmp_path, module, command):
    log = raised(f"ModuleNotFoundError: No module named '{module}'")
    assert advice(tmp_path, log).startswith(command)


def test_a_package_that_lacks_a_part_of_itself_is_installed_anew(tmp_path):
    error = "ModuleNotFoundError: No module named 'deepspeed.accelerator'"
    log = raised(error, f"{SITE}/deepspeed/__init__.py")
    assert "--force-reinstall deepspeed" in advice(tmp_path, log)


NO_PARENT = "RuntimeError: Parent directory ./out does not exist."
NO_FOLDER = "FileNotFoundError: [Errno 2] No such file or directory: 'out/a/m.json'"
MISSPELT = "FileNotFoundError: [Errno 2] No such file or directory: '/data/trian.jsonl'"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        *(
            (raised(error), words)
            for words, error in rows(
                """
            expanduser                                  FileNotFoundError: [Errno 2] No such file or directory: '~/data/a.jsonl'
            begins at the folder in which the job runs  FileNotFoundError: [Errno 2] No such file or directory: 'out/model.pth'
            if torchvision is meant                     ModuleNotFoundError: No module named 'torchvison'
            if argparse is meant                        ModuleNotFoundError: No module named 'agparse'
            install it                                  ModuleNotFoundError: No module named 'my_models'
            """
            )
        ),
        (raised(NO_PARENT, code="torch.save(x, p)"), "os.makedirs('./out', exist_ok=True)"),
        (raised(NO_FOLDER, code='with open("out/a/m.json", "w") as file:'), "mkdir -p out/a"),
        (raised(MISSPELT, before="corpus: /data/train.jsonl\n"), "/data/train.jsonl"),
        *rows(
            r"""
            python: can't open file '/home/u/trian.py': [Errno 2] No such file\n  train.py
            job.sh: line 7: pyton: command not found\n  if python is meant
            usage: fit.py [-h] [--learning-rate LR]\nfit.py: error: unrecognized arguments: --learning_rate 0.1\n  --learning-rate
            mktemp: failed to create directory via template '/tmp/tmp.XX': No space left on device\n  export TMPDIR
            slurm_script: line 8: /opt/lmod/lmod/libexec/lmod: No such file or directory\n  Lmod itself is not on that node
            """
        ),
    ],
)
def test_advice_names_the_path_or_the_spelling(tmp_path, log, words):
    assert words in advice(tmp_path, log)


SHARED_MEMORY = (
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
    "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.\n"
)


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("pod/train-0 is running\n", "emptyDir: {medium: Memory"),
        ("docker run trainer\n", "docker run --shm-size"),
        ("", "--shm-size"),
    ],
)
def test_shared_memory_grows_in_the_way_of_what_runs_the_job(tmp_path, before, words):
    assert words in advice(tmp_path, before + SHARED_MEMORY)


def test_a_message_that_says_what_to_do_is_taken_at_its_word(tmp_path):
    error = "ValueError: numbers are missing. Make sure to run `scripts/count.py --config C` first."
    assert "run `scripts/count.py --config C` first" in advice(tmp_path, raised(error))


def test_a_time_limit_is_held_against_the_steps_that_were_done(tmp_path):
    steps = "".join(f"step {n}/90000 loss 2.1\n" for n in range(1000, 8001, 1000))
    log = f"{steps}slurmstepd: error: *** JOB 4711 ON n01 CANCELLED AT 2026-01-02T08:00:10 DUE TO TIME LIMIT ***\n"
    assert "8000 of 90000 steps were done" in advice(tmp_path, log)


@pytest.mark.parametrize(
    ("path", "variable"),
    [
        ("/home/u/.cache/huggingface/hub/blobs/a", "HF_HOME"),
        ("/home/u/.triton/cache/a.cubin", "TRITON_CACHE_DIR"),
        ("/tmp/torchinductor_u/a/b.py", "TORCHINDUCTOR_CACHE_DIR"),
        ("/home/u/.cache/torch_extensions/py311/x.o", "TORCH_EXTENSIONS_DIR"),
        ("/scratch/u/run/model.pth", None),
    ],
)
def test_a_cache_without_room_is_moved_by_the_variable_of_its_library(tmp_path, path, variable):
    log = raised(f"OSError: [Errno 122] Disk quota exceeded: '{path}'")
    told = advice(tmp_path, log)
    assert (f"export {variable}=" in told) if variable else ("export" not in told)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        *(
            (raised(error), words)
            for words, error in rows(
                """
            --max-model-len 45120          ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (45120).
            --gpu-memory-utilization 0.24  ValueError: Free memory on device (20.5/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB).
            1, 2, 4 and 7                  ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).
            8 or 16 ranks                  RuntimeError: world_size (12) is not divisible by 8
            Did you mean: 'ones'           AttributeError: module 'torch' has no attribute 'onse'. Did you mean: 'ones'?
            """
            )
        ),
        (raised(FULL, IN_THE_TRAINER, f"{SITE}/transformers/trainer_pt_utils.py"), "eval_acc"),
        (raised(FULL, file="/tmp/ipykernel_811/1.py"), "restart the kernel"),
    ],
)
def test_advice_has_the_sizes_and_names_that_fit(tmp_path, log, words):
    assert words in advice(tmp_path, log)


def test_every_value_is_used_in_some_advice():
    folder = Path(rules.__file__).parents[1]
    texts = [path.read_text() for path in folder.rglob("*.*") if path.suffix in (".py", ".txt")]
    assert [name for name in VALUES if not any(f"{{{name}" in text for text in texts)] == []
