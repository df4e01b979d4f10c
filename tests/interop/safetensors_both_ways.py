"""Has PyTorch and the program read each other's models: training goes on to the same end in both.

safetensors_both_ways.py PROGRAM
"""

import json
import pathlib
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, mse_loss

sys.path.append(str(pathlib.Path(__file__).parent.parent / "parity"))
from checks import check, run  # noqa: E402
from record import CHANNELS, CLASSES, MODELS, SIDE  # noqa: E402

SAMPLES, BATCH, LR = 100, 8, 0.05
FLAGS = {
    "linear": ["--model=linear"],
    "mlp": ["--model=mlp", "--hidden=24,12"],
    "cnn": ["--model=cnn", f"--channels={','.join(map(str, CHANNELS))}", "--loss=cross-entropy"],
}


def data(kind):
    if kind == "cnn":
        return torch.rand(SAMPLES, SIDE * SIDE), torch.randint(CLASSES, [SAMPLES])
    return torch.rand(SAMPLES, 20), torch.rand(SAMPLES, 1)


def scramble(model):
    """Numbers that no model begins with, in the buffers as well."""
    for name, tensor in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            tensor.fill_(17)
        else:
            tensor.uniform_(-0.5, 0.5)
            if name.endswith("running_var"):
                tensor += 1


def train(model, inputs, targets, loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in torch.arange(len(inputs)).split(BATCH):
        optimizer.zero_grad()
        loss(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()


def both_ways(program, kind, folder):
    torch.manual_seed(0)
    inputs, targets = data(kind)
    save_file({"inputs": inputs, "targets": targets}, folder / "data.safetensors")
    model = MODELS[kind]()
    with torch.no_grad():
        scramble(model)
    weights, metrics, saved = (folder / it for it in ["weights.safetensors", "metrics", "saved"])
    save_file(model.state_dict(), weights)
    flags = [f"--dataset=safetensors:{folder / 'data.safetensors'}", *FLAGS[kind]]
    flags += ["--nproc-per-node=1", f"--batch-size={BATCH}", f"--lr={LR}", "--no-shuffle"]

    # From PyTorch's file, in the program.
    files = [f"--init-from={weights}", f"--checkpoint-dir={saved}", f"--metrics={metrics}"]
    run(program, *flags, *files, "--val-fraction=0.2")
    # The same in PyTorch. The program's data has the seed after that of its model, which is 0.
    seed = torch.Generator().manual_seed(1)
    parts = torch.utils.data.random_split(range(SAMPLES), [0.8, 0.2], seed)
    training, validation = (torch.tensor(part.indices) for part in parts)
    loss = cross_entropy if kind == "cnn" else mse_loss
    train(model, inputs[training], targets[training], loss)

    # The program's file, in PyTorch.
    [file] = saved.glob("step-*/model.safetensors")
    loaded = MODELS[kind]()
    loaded.load_state_dict(load_file(file), strict=True)
    expected = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        where = lambda text: f"{kind}, {name}: {text}"
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=where)
    with torch.no_grad():
        outputs = loaded.eval()(inputs[validation])
    lines = map(json.loads, metrics.read_text().splitlines())
    [ours] = [line for line in lines if line["event"] == "validation"]
    known = targets[validation]
    theirs = loss(outputs.double(), known if kind == "cnn" else known.double())
    check(abs(ours["loss"] / theirs.item() - 1) < 1e-6, f"{kind}: {ours} and {theirs}")
    if kind == "cnn":
        right = (outputs.argmax(-1) == known).double().mean().item()
        check(ours["accuracy"] == right, f"{kind}: {ours} and {right}")
    return ours["loss"], theirs.item()


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    torch.set_num_threads(1)
    for kind in FLAGS:
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = both_ways(program, kind, pathlib.Path(folder))
        print(f"{kind:8}goes both ways; loss in the program {ours:.9f}, in PyTorch {theirs:.9f}")


if __name__ == "__main__":
    main()
