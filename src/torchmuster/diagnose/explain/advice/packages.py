"""What pip calls the packages whose modules have other names, and how those are installed that need more than a name."""

# Source: the projects' pages on PyPI.
_DISTRIBUTIONS = {
    "cv2": "opencv-python-headless",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "yaml": "PyYAML",
    "PIL": "Pillow",
    "bs4": "beautifulsoup4",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "git": "GitPython",
    "google.protobuf": "protobuf",
    "attr": "attrs",
    "Crypto": "pycryptodome",
    "OpenSSL": "pyOpenSSL",
    "pkg_resources": "'setuptools<81'",
    "Levenshtein": "python-Levenshtein",
    "hydra": "hydra-core",
    "pytorch_lightning": "pytorch-lightning",
    "lightning_fabric": "lightning-fabric",
    "etcd": "python-etcd",
    "faiss": "faiss-cpu",
    "fitz": "PyMuPDF",
    "magic": "python-magic",
    "pynvml": "nvidia-ml-py",
    "sentence_transformers": "sentence-transformers",
    "rouge_score": "rouge-score",
    "torch_geometric": "torch-geometric",
    "umap": "umap-learn",
    "usb": "pyusb",
    "zmq": "pyzmq",
    "huggingface_hub": "huggingface-hub",
    "ray": "'ray[default]'",
}
# These are compiled against the torch that is installed, so pip must not build them apart from it.
_BUILT_AGAINST_TORCH = {
    "flash_attn": "flash-attn",
    "flash_attn_2_cuda": "flash-attn",
    "flash_attn_cuda": "flash-attn",
    "mamba_ssm": "mamba-ssm",
    "causal_conv1d": "causal-conv1d",
    "causal_conv1d_cuda": "causal-conv1d",
    "selective_scan_cuda": "mamba-ssm",
    "torch_scatter": "torch-scatter",
    "torch_sparse": "torch-sparse",
    "torch_cluster": "torch-cluster",
    "pytorch3d": "git+https://github.com/facebookresearch/pytorch3d",
    "detectron2": "git+https://github.com/facebookresearch/detectron2",
    "transformer_engine": "'transformer_engine[pytorch]'",
    "transformer_engine_torch": "'transformer_engine[pytorch]'",
    "tinycudann": "git+https://github.com/NVlabs/tiny-cuda-nn/#subdirectory=bindings/torch",
    "diff_gaussian_rasterization": "git+https://github.com/graphdeco-inria/diff-gaussian-rasterization",
    "exllamav2_ext": "exllamav2",
    "apex": "git+https://github.com/NVIDIA/apex",
    "amp_C": "git+https://github.com/NVIDIA/apex",
    "fused_layer_norm_cuda": "git+https://github.com/NVIDIA/apex",
    "grouped_gemm": "git+https://github.com/fanshiqing/grouped_gemm",
}


def distribution_of(module: str) -> str:
    """Return what to write behind `pip install` for a module; empty where the name of its package is not known.

    A module of the user's own looks like any other that is missing: only names that are known to be on PyPI are said.
    """
    top = module.partition(".")[0]
    if top in _BUILT_AGAINST_TORCH:
        return f"{_BUILT_AGAINST_TORCH[top]} --no-build-isolation"
    return (
        _DISTRIBUTIONS.get(module) or _DISTRIBUTIONS.get(top) or (top if top in _SAME_NAME else "")
    )


_SAME_NAME = frozenset(
    {
        *(
            "accelerate",
            "aiohttp",
            "albumentations",
            "apache_beam",
            "av",
            "bitsandbytes",
            "boto3",
            "click",
        ),
        *(
            "dask",
            "datasets",
            "decord",
            "deepspeed",
            "diffusers",
            "dill",
            "evaluate",
            "fairscale",
            "fairseq",
        ),
        *(
            "fire",
            "ftfy",
            "gymnasium",
            "h5py",
            "imageio",
            "jax",
            "joblib",
            "jsonlines",
            "kornia",
            "librosa",
        ),
        *(
            "lightning",
            "lmdb",
            "loguru",
            "matplotlib",
            "mlflow",
            "mosaicml",
            "msgpack",
            "networkx",
            "ninja",
        ),
        *(
            "nltk",
            "numba",
            "numpy",
            "omegaconf",
            "onnx",
            "onnxruntime",
            "optuna",
            "packaging",
            "pandas",
        ),
        *(
            "peft",
            "plotly",
            "polars",
            "protobuf",
            "psutil",
            "pyarrow",
            "pydantic",
            "regex",
            "requests",
            "rich",
        ),
        *(
            "sacrebleu",
            "safetensors",
            "scipy",
            "seaborn",
            "sentencepiece",
            "seqeval",
            "sglang",
            "shapely",
        ),
        *(
            "soundfile",
            "spacy",
            "submitit",
            "sympy",
            "tabulate",
            "tensorboard",
            "tensorflow",
            "termcolor",
        ),
        *(
            "tiktoken",
            "tokenizers",
            "torchaudio",
            "torchmetrics",
            "torchvision",
            "tqdm",
            "transformers",
        ),
        *(
            "triton",
            "trl",
            "typer",
            "webdataset",
            "xformers",
            "xgboost",
            "yacs",
            "zarr",
            "zstandard",
            "setuptools",
        ),
        *("einops", "mpi4py", "pycocotools", "rouge", "tensorboardX", "timm", "vllm", "wandb"),
    }
)

KNOWN_MODULES = frozenset({"torch", *_DISTRIBUTIONS, *_BUILT_AGAINST_TORCH, *_SAME_NAME})
