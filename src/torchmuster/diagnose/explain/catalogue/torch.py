"""Exceptions of torch about tensors: sizes, data types, devices, gradients, random numbers.

Sources: torch 1.12 to 2.9, aten/src/ATen (TensorIterator, native/), torch/csrc/autograd, torch/amp, torch/cuda.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_tensor = partial(
    KnownMessage,
    source="torch 1.12 to 2.9, aten/src/ATen, torch/",
    tells=Tells.PROVES,
    is_raised=True,
)
_gradient = partial(
    KnownMessage,
    source="torch 1.12 to 2.9, torch/csrc/autograd, torch/amp",
    tells=Tells.PROVES,
    is_raised=True,
    cause="autograd",
)

ENTRIES: tuple[KnownMessage, ...] = (
    # Sizes.
    _tensor(
        name="torch.matmul-shapes",
        wordings=(
            r"(?:mat1 and mat2|mat_a and mat_b) shapes cannot be multiplied \((?P<one>\d+x\d+) and (?P<other>\d+x\d+)\)",
            r"size mismatch, m1: \[(?P<one2>[\dx ]+)\], m2: \[(?P<other2>[\dx ]+)\]",
        ),
        cause="shapes-differ",
        error="a matrix product of {who} got sizes that do not fit: {one}{one2} and {other}{other2}",
        advice="make in_features of that layer the last dimension of its input; print x.shape before the line",
        advice_in={
            "anywhere": "the layer has in_features={matrix_want} and its input has {matrix_have} in the last dimension: give the layer in_features={matrix_have}, or bring its input to {matrix_want}",
        },
    ),
    _tensor(
        name="torch.elementwise-shapes",
        wordings=(
            r"The size of tensor a \((?P<one>\d+)\) must match the size of tensor b \((?P<other>\d+)\) at non-singleton dimension (?P<dim>\d+)",
        ),
        cause="shapes-differ",
        error="two tensors of {who} have {one} and {other} entries in dimension {dim}",
        advice="print both shapes before the line; a last batch that is smaller needs drop_last=True, or sizes that are read from the tensor",
        advice_in={
            "anywhere": "there are {positions} positions: cut the input to them (truncation=True, max_length={positions}), or make the table of positions longer",
        },
    ),
    _tensor(
        name="torch.cat-shapes",
        wordings=(
            r"Sizes of tensors must match except in dimension (?P<dim>\d+)\W*(?P<rest>.*)",
            r"stack expects each tensor to be equal size, but got (?P<one>\[[\d, ]*\]) at entry 0 and (?P<other>\[[\d, ]*\])",
        ),
        cause="shapes-differ",
        error="tensors that {who} joined have different sizes: {words:.160}",
        advice="pad or cut them to one size; samples of a batch need a collate_fn that pads",
    ),
    _tensor(
        name="torch.view-size",
        wordings=(
            r"shape '(?P<shape>\[[-\d, ]*\])' is invalid for input of size (?P<size>\d+)",
            r"view size is not compatible with input tensor's size and stride",
        ),
        cause="shapes-differ",
        error="a tensor of {who} cannot be viewed in another shape: {words:.160}",
        advice="read sizes from the tensor (x.size(0), -1), and use reshape where memory is not contiguous",
        advice_in={
            "anywhere": "{odd_view}: mostly the last batch, which is smaller; read the size from the tensor (x.size(0)), or drop_last=True for the loader",
        },
    ),
    _tensor(
        name="torch.conv-channels",
        wordings=(
            r"[Gg]iven groups=\d+, weight of size \[(?P<weight>[\d, ]+)\], expected input\[(?P<input>[\d, ]+)\] to have (?P<wanted>\d+) channels, but got (?P<got>\d+)",
        ),
        cause="shapes-differ",
        error="a convolution of {who} expects {wanted} channels and got {got}",
        advice="set in_channels of that layer to what the data has; images need the order (batch, channels, height, width)",
        advice_in={
            "anywhere": "the layer has in_channels={wanted}, the data {got}: give the layer in_channels={got}, or bring the data to {wanted} (images: .convert('RGB'), or x.expand for gray ones); the order is (batch, channels, height, width)",
        },
    ),
    _tensor(
        name="torch.kernel-larger",
        wordings=(
            r"Kernel size can't be greater than actual input size",
            r"Output size is too small",
            r"Expected more than 1 value per channel when training",
        ),
        cause="shapes-differ",
        error="the input of a layer of {who} is too small: {words:.160}",
        advice="use larger inputs, or drop the last batch if it has one sample: drop_last=True",
    ),
    _tensor(
        name="torch.loss-shapes",
        wordings=(
            r"Expected input batch_size \((?P<one>\d+)\) to match target batch_size \((?P<other>\d+)\)",
            r"Target size \(torch\.Size\((?P<one2>[^)]*)\)\) must be the same as input size \(torch\.Size\((?P<other2>[^)]*)\)\)",
            r"0D or 1D target tensor expected, multi-target not supported",
        ),
        cause="shapes-differ",
        error="outputs and labels of {who} have different shapes: {words:.160}",
        advice="print output.shape and target.shape before the loss; class numbers are one per sample, view(-1, classes) and view(-1) for tokens",
    ),
    _tensor(
        name="torch.input-dimensions",
        wordings=(
            r"Expected \dD \(?\S* ?(?:or|,) ?.*input to \w+, but got input of size: (?P<size>\[[\d, ]*\])",
            r"Dimension out of range \(expected to be in range of (?P<range>\[[-\d, ]*\]), but got (?P<got>-?\d+)\)",
            r"input\.size\(-1\) must be equal to input_size|normalized_shape=\[(?P<norm>[\d, ]+)\], expected input with shape",
        ),
        cause="shapes-differ",
        error="a layer of {who} got an input with other dimensions than it takes: {words:.160}",
        advice="print x.shape before the line; a missing batch dimension is x.unsqueeze(0)",
    ),
    _tensor(
        name="torch.heads-divide",
        wordings=(
            r"embed_dim must be divisible by num_heads",
            r"hidden[ _]size \(?(?P<size>\d+)\)? (?:is not|must be) (?:a multiple of|divisible by) the number of attention heads",
        ),
        cause="shapes-differ",
        error="the width of the model of {who} cannot be divided by the number of attention heads",
        advice="choose a hidden size that is a multiple of the number of heads",
    ),
    # Indices and values.
    _tensor(
        name="torch.embedding-index",
        wordings=(
            r"IndexError: index out of range in self",
            r"Target (?P<target>-?\d+) is out of bounds",
            r"index (?P<index>-?\d+) is out of bounds for dimension (?P<dim>\d+) with size (?P<size>\d+)",
            r"Class values must be (?:smaller than num_classes|non-negative)",
        ),
        cause="index-out-of-range",
        error="an index, token or label of {who} is out of range: {words:.160}",
        advice="compare the largest token id or label with the size of the table: model.resize_token_embeddings(len(tokenizer)), or num_classes",
        advice_in={
            "anywhere": (
                "the table is that of the {position_table}: the input has {num_tokens} tokens and the model {max_tokens} of them: truncation=True, max_length={max_tokens} for the tokenizer",
                "the label {target} needs a last layer of at least {classes_needed} classes (num_labels, num_classes), or labels that begin at 0",
                "that dimension has the indices 0 to {last_index}, and {index} was asked for: see how that line works its index out",
            ),
        },
    ),
    _tensor(
        name="torch.ambiguous-truth",
        wordings=(
            r"Boolean value of Tensor with (?:more than one|no) values? is ambiguous",
            r"a Tensor with \d+ elements cannot be converted to Scalar",
            r"only one element tensors can be converted to Python scalars",
        ),
        cause="shapes-differ",
        error="{who} used a tensor of several values where one number is needed",
        advice="reduce it first: .mean().item(), .all(), or torch.where in place of `if`",
    ),
    _tensor(
        name="torch.numpy-of-gpu",
        wordings=(r"can't convert (?P<device>\w+:?\d*) device type tensor to numpy",),
        cause="devices-differ",
        error="{who} made a numpy array of a tensor that is on {device}",
        advice="x.detach().cpu().numpy()",
    ),
    # Data types.
    _tensor(
        name="torch.dtypes-matmul",
        wordings=(
            r"(?:expected (?:m1 and m2|mat1 and mat2|mat1 and mat2) to have the same dtype, but got|must have the same dtype, b[uo]t got):? (?P<one>[\w: ]+?) (?:!=|and) (?P<other>[\w: ]+)",
            r"expected scalar type (?P<one2>\w+) but found (?P<other2>\w+)",
            r"Input type \((?P<one3>[\w.]+)\) and bias type \((?P<other3>[\w.]+)\) should be the same",
            r"Found dtype (?P<one4>\w+) but expected (?P<other4>\w+)",
            r"expected target dtype to be (?P<one6>Long) or Byte, but got (?P<other6>\w+)",
            r"Index put requires the source and destination dtypes match, got (?P<one5>\w+) for the destination and (?P<other5>\w+)",
        ),
        cause="dtypes-differ",
        error="tensors of one operation of {who} have different data types: {one}{one2}{one3}{one4}{one5}{one6} and {other}{other2}{other3}{other4}{other5}{other6}",
        advice="compute under torch.autocast('cuda', torch.bfloat16), or convert one of them: x.to(weight.dtype); labels of cross entropy are long, those of MSE float",
        advice_in={
            "anywhere": (
                "{long_wanted} is wanted, class numbers or indices: y.long()",
                "the Double comes from numpy or from Python's numbers, the rest is {double_beside}: x.float() where it becomes a tensor (torch.from_numpy(a).float())",
            ),
        },
    ),
    _tensor(
        name="torch.dtypes-result",
        wordings=(
            r"result type (?P<one>\w+) can't be cast to the desired output type (?P<other>\w+)",
            r"Expected tensor for argument #\d '\w+' to have (?:one of the following scalar types|scalar type).*but got (?P<other2>[\w.]+)",
        ),
        cause="dtypes-differ",
        error="an operation of {who} got a data type that it does not take: {words:.160}",
        advice="token ids and labels are long: x.long(); values are float: x.float()",
    ),
    _tensor(
        name="torch.not-implemented-dtype",
        wordings=(r"\"(?P<op>\w+)\" not implemented for '(?P<type>\w+)'",),
        cause="dtypes-differ",
        error="{op} does not exist for {type} on this device",
        advice="convert before the line (x.float()); Half on the CPU means that the model was not moved to the GPU",
    ),
    _tensor(
        name="torch.flash-dtype",
        wordings=(
            r"FlashAttention only supports? fp16(?:,| and) .*data type",
            r"Expected query, key, and value to have the same dtype",
        ),
        cause="dtypes-differ",
        error="attention of {who} got a data type that it does not take: {words:.160}",
        advice="load the model with torch_dtype=torch.bfloat16, or train under torch.autocast('cuda', torch.bfloat16)",
        advice_in={
            "anywhere": "{attention_types}: bring them to one type before the line, q = q.to(k.dtype), as after a layer or a position code that computes in float32",
        },
    ),
    # Devices.
    KnownMessage(
        name="torch.devices-differ",
        wordings=(
            r"Expected all tensors to be on the same device",
            r"(?i)Input type \(\S*cuda\S*\) and weight type \((?!\S*cuda)\S+\) should be the same",
            r"(?i)Input type \((?!\S*cuda)\S+\) and weight type \(\S*cuda\S*\) should be the same",
        ),
        source="torch 1.5 to 2.9, aten/src/ATen/TensorIterator.cpp, native/Convolution.cpp",
        tells=Tells.PROVES,
        is_raised=True,
        cause="devices-differ",
        error="tensors of one operation lie on different devices: {words:.200}",
        advice="move model and inputs to one device: model.to(device), batch = batch.to(device), device = cuda:LOCAL_RANK",
        advice_in={
            "data-parallel": "nn.DataParallel gives each GPU a copy of the model, and a tensor that the model keeps by itself stays on one GPU: start with torchrun --nproc-per-node=NUM_GPUS (DDP), show one GPU only (CUDA_VISIBLE_DEVICES=0), or move the tensor to its neighbour's device in that line (y.to(x.device))",
            "anywhere": "{made} makes its tensor on the CPU, and the other one lies on {gpu_beside_cpu}: give it device=x.device, x being the other tensor of the line",
        },
    ),
    _tensor(
        name="torch.cpu-for-gpu-backend",
        wordings=(
            r"No backend type associated with device type (?P<device>\w+)",
            r"Tensors must be CUDA and dense",
        ),
        cause="invalid-collective",
        error="{who} called a collective with a tensor of a device that the group has no backend for: {device}",
        advice="move the tensor to the GPU first, or give the group both: init_process_group('cpu:gloo,cuda:nccl')",
    ),
    _tensor(
        name="torch.meta-tensor",
        wordings=(
            r"Cannot copy out of meta tensor; no data",
            r"Tensor on device meta is not on the expected device",
        ),
        cause="sharding",
        error="{who} uses parameters that were made without data (on the device meta) and never loaded",
        advice="model.to_empty(device=...) and then load or initialise them; with from_pretrained, no device_map='auto' under a launcher",
    ),
    _tensor(
        name="torch.fake-devices",
        wordings=(
            r"Attempting to deserialize object on (?:CUDA|XPU|HPU) device (?P<index>\d+) but",
        ),
        cause="checkpoint-differs",
        error="a checkpoint holds tensors of a GPU that {who} does not see",
        advice="torch.load(path, map_location='cpu')",
    ),
    _tensor(
        name="torch.pin-gpu",
        wordings=(r"cannot pin '(?P<type>[\w.]+)' only dense CPU tensors can be pinned",),
        cause="devices-differ",
        error="the loader of {who} should pin tensors that are on a GPU already",
        advice="return CPU tensors from the data set, or set pin_memory=False",
    ),
    # Gradients.
    _gradient(
        name="torch.backward-twice",
        wordings=(r"Trying to backward through the graph a second time",),
        error="{who} ran backward twice through one graph",
        advice="make a new forward pass for each backward, detach what is carried from step to step (hidden = hidden.detach()), or retain_graph=True",
    ),
    _gradient(
        name="torch.no-gradient",
        wordings=(
            r"element \d+ of (?:tensors|variables) does not require grad and does not have a grad_fn",
        ),
        error="the loss of {who} does not depend on any parameter that is trained",
        advice="look for torch.no_grad(), .detach() or .item() before the loss, and for frozen layers; checkpointing with frozen embeddings needs model.enable_input_require_grads()",
    ),
    _gradient(
        name="torch.in-place",
        wordings=(
            r"one of the variables needed for gradient computation has been modified by an inplace operation",
        ),
        tells=Tells.NAMES,
        rivals=("models-differ",),
        error="{who} overwrote a tensor that backward still needed",
        advice="replace x += y and relu_(x) by copies; under DDP with two forward passes before backward, broadcast_buffers=False; torch.autograd.set_detect_anomaly(True) names it",
    ),
    _gradient(
        name="torch.leaf-in-place",
        wordings=(
            r"a (?:view of a )?leaf [Vv]ariable that requires grad (?:is being|has been) used in an in-place operation",
        ),
        error="{who} changed a parameter in place where its gradient is recorded",
        advice="change it under torch.no_grad()",
    ),
    _gradient(
        name="torch.scalar-gradient",
        wordings=(r"grad can be implicitly created only for scalar outputs",),
        error="{who} called backward on a loss of several values",
        advice="loss.mean().backward(); nn.DataParallel returns one loss per GPU",
    ),
    _gradient(
        name="torch.unused-in-graph",
        wordings=(
            r"One of the differentiated Tensors (?:appears to not have been used in the graph|does not require grad)",
        ),
        error="{who} asked for the gradient of a tensor that the loss does not use",
        advice="allow_unused=True in torch.autograd.grad, or use it in the loss",
    ),
    _gradient(
        name="torch.anomaly",
        wordings=(r"Function '(?P<function>\w+)' returned nan values in its (?P<n>\d+)th output",),
        cause="not-finite",
        error="backward of {function} gave NaN on {who}",
        advice="look at the forward line in the traceback above: a square root or logarithm of 0, a division by 0, or fp16 that overflows (bf16 does not)",
    ),
    _gradient(
        name="torch.scaler-fp16",
        wordings=(r"Attempting to unscale FP16 gradients",),
        cause="dtypes-differ",
        error="{who} trains parameters that are fp16 themselves under a gradient scaler",
        advice="keep the parameters in fp32 and compute under torch.autocast, or train in bf16 without a scaler",
    ),
    _gradient(
        name="torch.scaler-order",
        wordings=(
            r"No inf checks were recorded (?:for this optimizer|prior to update)",
            r"unscale_\(\) (?:has already been called|is being called after step)",
            r"step\(\) has already been called since the last update",
        ),
        error="the gradient scaler of {who} was called in another order than scale, unscale, step, update: {words:.160}",
        advice="scaler.scale(loss).backward(); scaler.unscale_(opt); clip; scaler.step(opt); scaler.update(), once per step, with parameters that have gradients",
    ),
    _gradient(
        name="torch.clip-not-finite",
        wordings=(
            r"The total norm of order (?P<order>\S+) for gradients from `parameters` is non-finite",
        ),
        cause="not-finite",
        error="the gradients of {who} are NaN or infinite",
        advice="a smaller learning rate, warm-up, or bf16 in place of fp16; skip such steps",
    ),
    _gradient(
        name="torch.no-parameters",
        wordings=(r"optimizer got an empty parameter list",),
        error="the optimizer of {who} got no parameters",
        advice="make it after the layers exist and are unfrozen, and give it a list: a generator that was read once is empty",
    ),
    _gradient(
        name="torch.deepcopy-graph",
        wordings=(
            r"Only Tensors created explicitly by the user \(graph leaves\) support the deepcopy protocol",
        ),
        error="{who} copied a model or object that holds a tensor with a gradient history",
        advice="store x.detach() in the object, not x",
    ),
    # Random numbers, determinism, limits.
    _tensor(
        name="torch.distribution-values",
        wordings=(
            r"Expected (?:parameter|value argument) (?:(?P<name>\w+) )?\(.*to (?:satisfy the constraint|be within the support)",
            r"normal expects (?:all elements of )?(?P<deviation>std) >= 0",
        ),
        tells=Tells.NAMES,
        cause="not-finite",
        rivals=("value-out-of-range",),
        error="a distribution of {who} got values that it does not take, mostly NaN: {name}{deviation}",
        advice="look for where NaN begins: torch.autograd.set_detect_anomaly(True); a smaller learning rate, and bf16 in place of fp16",
        advice_in={
            "anywhere": "{deviation} has to be positive: let the network give its logarithm, log_std.clamp(-20, 2).exp(), or softplus(x) + 1e-6; where it is NaN, a smaller learning rate and clipped gradients"
        },
    ),
    _tensor(
        name="torch.singular",
        wordings=(
            r"(?:input is not positive-definite|The (?:algorithm failed to converge|solver failed because the input matrix is singular)|The diagonal element \d+ is zero, the inversion could not be completed)",
        ),
        tells=Tells.NAMES,
        cause="value-out-of-range",
        rivals=("not-finite",),
        error="a matrix of {who} cannot be factorised or inverted",
        advice="add a small value to its diagonal (A + 1e-6 * I), compute in float32 or float64, and look for NaN in it",
    ),
    _tensor(
        name="torch.value-range",
        wordings=(
            r"Trying to create tensor with negative dimension (?P<value>-?\d+)",
            r"Overflow when unpacking long",
            r"value cannot be converted to type (?P<type>\w+) without overflow",
        ),
        cause="value-out-of-range",
        error="{who} made a tensor of a size or value that cannot be: {words:.160}",
        advice="print the number at that line: it comes from data or from a subtraction; masks of -1e9 need torch.finfo(x.dtype).min",
    ),
    _tensor(
        name="torch.rng-state",
        wordings=(
            r"RNG state must be a torch\.ByteTensor",
            r"RNG state is wrong size",
            r"Expected a '(?P<one>\w+)' device type for generator but found '(?P<other>\w+)'",
        ),
        cause="checkpoint-differs",
        error="{who} set the state of a random number generator of another device",
        advice="load it with map_location='cpu' and call torch.set_rng_state on the CPU's, torch.cuda.set_rng_state on the GPU's; a Generator needs device=",
    ),
    _tensor(
        name="torch.deterministic",
        wordings=(
            r"(?P<op>\S+) does not have a deterministic implementation, but you set",
            r"Deterministic behavior was enabled with either .* but this operation is not deterministic because it uses CuBLAS",
        ),
        cause="bad-setting",
        error="deterministic algorithms were asked for, and an operation of {who} has none: {op}",
        advice="CUBLAS_WORKSPACE_CONFIG=:4096:8 in the job, and torch.use_deterministic_algorithms(True, warn_only=True)",
    ),
    _tensor(
        name="torch.tensor-too-large",
        wordings=(
            r"nonzero is not supported for tensors with more than INT_MAX elements",
            r"(?:canUse32BitIndexMath|INT_MAX|integer out of range).*(?:tensor|elements|input)",
            r"quantile\(\) input tensor is too large",
        ),
        cause="shapes-differ",
        error="a tensor of {who} has more entries than this operation can count (2^31)",
        advice="work in parts: a smaller batch or sequence, or x.split(...)",
    ),
    _tensor(
        name="torch.inference-tensor",
        wordings=(
            r"Inference tensors cannot be saved for backward",
            r"Inplace update to inference tensor outside InferenceMode",
        ),
        cause="autograd",
        error="{who} trains with tensors that were made under torch.inference_mode",
        advice="use torch.no_grad() for them, or .clone() them outside",
    ),
)
