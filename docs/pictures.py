"""Draws the pictures that explain data parallelism into docs/src/pictures: pictures.py [--check]

Each picture is drawn in English, NAME.svg, and in Chinese, NAME.zh.svg. What a picture shows of an algorithm is
computed here: the chunks of the ring, the sums of the tree, the contents of the buckets, the sizes of the memory. With
--check nothing is written; the exit code is 1 if a file differs from what would be drawn.
"""

import pathlib
import sys
from xml.sax.saxutils import escape

FOLDER = pathlib.Path(__file__).parent / "src/pictures"
LANGUAGES = ["en", "zh"]
# Sizes are in pixels.
WIDTH, MARGIN, FONT, SMALL = 760, 24, 15, 13
FAMILIES = {
    "en": 'system-ui, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif',
    "zh": '"Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif',
}
CODE = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'

# The table that `make compare` gives, a row for each piece of work: PyTorch, ddp-mp and the ratio.
BENCHMARKS = FOLDER.parent / "benchmarks.md"

# Each class of the drawing: its colours on a light page and on a dark one. The picture has a panel of its own, because
# the themes of mdBook do not follow the setting that CSS can ask for.
COLOURS = {
    "panel": ("fill:#f6f8fa;stroke:#d0d7de", "fill:#161b22;stroke:#3d444d"),
    "text": ("fill:#1f2328", "fill:#e6edf3"),
    "muted": ("fill:#57606a", "fill:#9da7b3"),
    "line": ("stroke:#57606a", "stroke:#9da7b3"),
    "head": ("fill:#57606a", "fill:#9da7b3"),
    "box": ("fill:#ffffff;stroke:#8c959f", "fill:#0d1117;stroke:#6e7681"),
    "group": ("fill:none;stroke:#8c959f", "fill:none;stroke:#6e7681"),
    "grid": ("stroke:#d0d7de", "stroke:#3d444d"),
    "area": ("fill:#eaeef2;stroke:#8c959f", "fill:#21262d;stroke:#6e7681"),
    "rank0": ("fill:#cfe3ff;stroke:#3b78c9", "fill:#1b3d68;stroke:#6ba4f0"),
    "rank1": ("fill:#ffe0b8;stroke:#b97417", "fill:#5b3a0c;stroke:#e0a04a"),
    "rank2": ("fill:#dccffb;stroke:#7a55c7", "fill:#402b70;stroke:#ae8df2"),
    "rank3": ("fill:#ffd3dc;stroke:#c2496a", "fill:#632338;stroke:#ee84a0"),
    "sum": ("fill:#c6ecd0;stroke:#2c8a4b", "fill:#16482a;stroke:#55bd78"),
    "line0": ("stroke:#3b78c9", "stroke:#6ba4f0"),
    "line1": ("stroke:#b97417", "stroke:#e0a04a"),
    "line2": ("stroke:#7a55c7", "stroke:#ae8df2"),
    "head0": ("fill:#3b78c9", "fill:#6ba4f0"),
    "head1": ("fill:#b97417", "fill:#e0a04a"),
    "head2": ("fill:#7a55c7", "fill:#ae8df2"),
}

# All words, in English and in Chinese.
LABELS = {
    # data-parallel
    "data-parallel": ("One step of data parallelism on three ranks", "三个 rank 的数据并行：一步"),
    "data-parallel.desc": (
        "The data set is dealt to three ranks. Each rank computes a gradient from its own samples with its own "
        "replica of the model. An all-reduce gives all ranks the mean of the gradients. All ranks then make the "
        "same update.",
        "数据集分给三个 rank。每个 rank 用自己的样本和自己的模型副本计算梯度。"
        "all-reduce 让所有 rank 得到梯度的平均值，然后所有 rank 做同样的更新。",
    ),
    "data set": ("data set", "数据集"),
    "shuffled": ("shuffled", "已打乱"),
    "shard": ("shard", "分片"),
    "replica": ("replica", "副本"),
    "gradient": ("gradient", "梯度"),
    "different": ("different", "各不相同"),
    "the same": ("the same", "相同"),
    "forward and": ("forward and", "前向传播、"),
    "backward": ("backward", "反向传播"),
    "parameters W": ("parameters W", "参数 W"),
    "all-reduce mean": ("all-reduce: g = (g0 + g1 + g2) / 3", "all-reduce（全归约）：g = (g0 + g1 + g2) / 3"),
    "optimizer": ("optimizer", "优化器"),
    # one-wrong-number
    "one-wrong-number": ("Where one wrong number goes in a step of two ranks", "两个 rank 的一步里，一个错误的数会到哪里"),
    "one-wrong-number.desc": (
        "Samples, outputs of layers and losses of both ranks are the same as in the other run. One gradient of rank 1 is "
        "another. So the averages of both ranks are others, and so are the parameters of both.",
        "两个 rank 的样本、各层输出和损失都与另一次运行相同。rank 1 有一个梯度不同，"
        "于是两个 rank 的平均值都不同，两个 rank 的参数也都不同。",
    ),
    "samples": ("samples", "样本"),
    "layers": ("outputs", "各层输出"),
    "loss": ("loss", "损失"),
    "average": ("average", "平均值"),
    "parameters": ("parameters", "参数"),
    "other": ("another", "不同"),
    "the cause": ("the first: the cause", "第一处：原因"),
    "consequences": ("consequences", "后果"),
    "next step": (
        "In the next step all differs but the samples. At the end nothing says where it began.",
        "下一步里，除了样本，一切都不同。到运行结束时，已经看不出从哪里开始。",
    ),
    # ring-all-reduce
    "ring-all-reduce": ("A ring all-reduce of four ranks and four chunks", "环形 all-reduce：四个 rank，四块"),
    "ring-all-reduce.desc": (
        "In each of six steps every rank sends one chunk to the next rank. In the first three steps the receiver "
        "adds the chunk to its own. In the last three steps the receiver keeps the complete sum.",
        "一共六步，每一步里每个 rank 把一块发给下一个 rank。前三步里，接收者把它加到自己的那块上；后三步里，"
        "接收者保存完整的和。",
    ),
    "start": ("start", "开始"),
    "step": ("step {}", "第 {} 步"),
    "step add": ("step {}: add", "第 {} 步：相加"),
    "step copy": ("step {}: copy", "第 {} 步：复制"),
    "reduce-scatter": ("reduce-scatter: each rank gets the sum of one chunk", "reduce-scatter：每个 rank 得到一块的和"),
    "all-gather": ("all-gather: each rank gets all sums", "all-gather：每个 rank 得到所有的和"),
    "sum": ("sum", "和"),
    "own values": ("own values", "自己的值"),
    "part of the sum": ("part of the sum", "部分和"),
    "complete sum": ("complete sum", "完整的和"),
    "just received": ("just received", "这一步收到"),
    "chunk": ("chunk", "块"),
    # tree-all-reduce
    "tree-all-reduce": ("A tree all-reduce of eight ranks", "树形 all-reduce：八个 rank"),
    "tree-all-reduce.desc": (
        "In three steps the sums go up the tree to rank 0: from four ranks, then two, then one. In three more "
        "steps the sum goes down again, until all eight ranks have it.",
        "前三步把和沿着树向上送到 rank 0：先是四个 rank 发送，再是两个，最后一个。后三步再把和向下送，"
        "直到八个 rank 都有。",
    ),
    "reduce": ("reduce", "归约"),
    "broadcast": ("broadcast", "广播"),
    # threaded-all-reduce
    "threaded-all-reduce": ("An all-reduce of four threads", "四个线程的 all-reduce"),
    "threaded-all-reduce.desc": (
        "Four tensors have four slices each. Rank 0 reads slice 0 of all four tensors, adds them up and writes "
        "the sum to slice 0 of all four tensors. The other ranks do the same with their slices at the same time.",
        "四个张量各有四段。rank 0 读取四个张量的第 0 段，相加，再把和写回四个张量的第 0 段。"
        "其他 rank 同时对自己的那一段做同样的事。",
    ),
    "slice": ("slice", "段"),
    "before": ("before", "之前"),
    "after": ("after", "之后"),
    "reads and adds": ("adds up slice {}", "对段 {} 求和"),
    "tensor of": ("tensor of rank {}", "rank {} 的张量"),
    "reads": ("reads", "读"),
    "writes": ("writes", "写"),
    # buckets
    "buckets": ("From parameters to buckets", "从参数到梯度桶"),
    "buckets.desc": (
        "A model has five layers. Going from the last layer to the first, the gradients fill bucket 0 until it "
        "has reached 1 MiB, then bucket 1 until it has reached 25 MiB, then bucket 2.",
        "模型有五层。从最后一层到第一层，梯度先放进桶 0，直到它达到 1 MiB；再放进桶 1，直到它达到 25 MiB；然后是桶 2。",
    ),
    "layer": ("layer {}", "第 {} 层"),
    "forward order": ("the layers, in the order of forward", "各层，按前向传播的顺序"),
    "backward order": ("backward computes their gradients in this order", "反向传播按这个顺序算出梯度"),
    "bucket": ("bucket", "桶"),
    "closes at": ("{}, has reached {}", "{}，已达到 {}"),
    "last": ("{}, the rest", "{}，剩下的"),
    # overlap
    "overlap": ("One step without overlap and with it", "一步：不重叠与重叠"),
    "overlap.desc": (
        "Without overlap the all-reduces of three buckets follow the backward pass. With overlap each bucket is "
        "reduced as soon as its gradients are complete, beside the backward pass of the other layers, and the "
        "step is shorter.",
        "不重叠时，三个桶的 all-reduce 在反向传播之后。重叠时，每个桶的梯度一到齐就开始归约，"
        "其他层的反向传播同时进行，于是这一步更短。",
    ),
    "without overlap": ("without overlap (--no-overlap)", "不重叠（--no-overlap）"),
    "with overlap": ("with overlap", "重叠"),
    "computes": ("rank", "rank"),
    "communicates": ("communication", "通信"),
    "thread or stream": ("thread or stream", "线程或 stream"),
    "forward": ("forward", "前向"),
    "backward of layer": ("backward of layer", "反向传播：层"),
    "all-reduce of bucket": ("all-reduce of bucket", "all-reduce：桶"),
    "update": ("update", "更新"),
    "time": ("time", "时间"),
    "saved": ("saved", "省下的时间"),
    # memory
    "memory": ("Memory of four ranks with AdamW", "四个 rank 用 AdamW 时的内存"),
    "memory.desc": (
        "P is the memory of the parameters. With replicas each of four ranks has {replica} P, together "
        "{replicas} P. With --zero each rank has {zero} P, together {zeros} P. With --share-model four ranks "
        "together have {shared} P.",
        "P 是参数占的内存。用副本时，四个 rank 各占 {replica} P，一共 {replicas} P；用 --zero 时各占 {zero} P，"
        "一共 {zeros} P；用 --share-model 时，四个 rank 一共 {shared} P。",
    ),
    "replicas": ("replicas", "副本"),
    "each rank": ("{} P on each rank", "每个 rank {} P"),
    "together": ("together {} P", "一共 {} P"),
    "shared by all": ("{} P for all ranks, and 1 P on each", "共用 {} P，每个 rank 另占 1 P"),
    "for replicas": ("threads or processes", "线程或进程"),
    "for --zero": ("processes, or a GPU each", "进程，或各有一块 GPU"),
    "for --share-model": ("threads of one process", "一个进程里的线程"),
    "parameters": ("parameters", "参数"),
    "gradients": ("gradients", "梯度"),
    "state": ("state of AdamW", "AdamW 的状态"),
    "all": ("all", "共用"),
    "unit": ("in units of P, the memory of the parameters; without activations", "以参数占的内存 P 为单位；不含激活值"),
    # collectives
    "collectives": ("What each collective does on three ranks", "三个 rank 上的各种集合通信"),
    "collectives.desc": (
        "Eight operations, each with the tensors of three ranks before and after it. Lines lead from the rank "
        "that has a tensor to the ranks that get it.",
        "八种操作，每种都画出三个 rank 之前和之后的张量。线从有张量的 rank 通向得到它的 rank。",
    ),
    "op broadcast": ("Every rank gets a copy of rank 0's tensor.", "每个 rank 都得到 rank 0 的张量。"),
    "op reduce": ("Rank 0 gets the sum; the others keep theirs.", "rank 0 得到和；其他 rank 的不变。"),
    "op all_reduce": ("Every rank gets the sum of all tensors.", "每个 rank 都得到所有张量之和。"),
    "op gather": ("Rank 0 gets the list of all tensors.", "rank 0 得到所有张量的列表。"),
    "op all_gather": ("Every rank gets the list of all tensors.", "每个 rank 都得到所有张量的列表。"),
    "op scatter": ("Rank 0 sends each rank its own tensor.", "rank 0 把各个张量发给对应的 rank。"),
    "op reduce_scatter": ("Every rank gets the sum of the parts for it.", "每个 rank 得到属于它的那部分之和。"),
    "op all_to_all": ("Every rank sends each rank its own tensor.", "每个 rank 给每个 rank 发一个张量。"),
    # launchers
    "launchers": ("Which process has which rank", "哪个进程有哪些 rank"),
    "launchers.desc": (
        "Four ranks in four layouts: four threads of one process; four processes of one machine; two machines "
        "with one process of two ranks each; two machines with two processes of one rank each.",
        "四个 rank 的四种布局：一个进程的四个线程；一台机器上的四个进程；两台机器，各一个进程，"
        "每个进程两个 rank；两台机器，各两个进程，每个进程一个 rank。",
    ),
    "machine": ("machine", "机器"),
    "process": ("process", "进程"),
    "threads of one process": ("threads of one process", "一个进程里的线程"),
    "processes of one machine": ("processes of one machine", "一台机器上的进程"),
    "Slurm, one task": ("Slurm, two machines, one task on each", "Slurm，两台机器，每台一个任务"),
    "Slurm, two tasks": ("Slurm, two machines, two tasks on each", "Slurm，两台机器，每台两个任务"),
    # what-moves-where
    "what-moves-where": ("What moves within machines and between them", "机器之内与机器之间传什么"),
    "what-moves-where.desc": (
        "Two machines have two processes each. The two ranks of a machine add up their gradients in shared "
        "memory. The first machine sends its sum over TCP, the second adds its own ranks to it and sends the mean back.",
        "两台机器各有两个进程。一台机器的两个 rank 在共享内存里把梯度相加。第一台通过 TCP 发送它的和，第二台加上自己的 rank，再把平均值发回。",
    ),
    "shared memory": ("shared memory", "共享内存"),
    "sum of the machine": ("sum of ranks {} and {}", "rank {} 与 {} 之和"),
    "mean of all": ("mean of all ranks", "所有 rank 的平均值"),
    "sum and mean": ("sum, and mean", "和，与平均值"),
    "mean on each": (
        "1. On the first machine, each rank adds up one slice of the gradients.",
        "1. 在第一台机器上，每个 rank 对梯度的一段求和。",
    ),
    "sends": (
        "2. Its first process sends the sum to the next machine, whose ranks add theirs. The mean returns.",
        "2. 它的第一个进程把和发给下一台机器，那里的 rank 接着相加。平均值再发回来。",
    ),
    "writes back": ("3. Each rank gets the mean of all gradients.", "3. 每个 rank 得到所有梯度的平均值。"),
    # after-a-failure
    "after-a-failure": ("The state of each rank when rank 1 dies", "rank 1 被杀死时，各个 rank 的状态"),
    "after-a-failure.desc": (
        "Three ranks have the state after step 39. In step 40 rank 1 dies, and ranks 0 and 2 wait for it in the "
        "all-reduce. They still have that state. Rank 0 saves it. After the restart all three ranks begin step 40 from it.",
        "三个 rank 都有第 39 步之后的状态。第 40 步里 rank 1 被杀死，rank 0 和 rank 2 在 all-reduce 里等它，仍保有该状态。"
        "rank 0 把它保存下来。重启之后，三个 rank 都从它开始第 40 步。",
    ),
    "after step": ("after step #39", "第 39 步之后"),
    "in step": ("in step #40", "第 40 步之中"),
    "first back": ("after the failure", "故障之后"),
    "restart": ("the restart", "重启"),
    "whole state": ("state", "状态"),
    "waits": ("waits in all-reduce", "在 all-reduce 里等待"),
    "dies": ("dies", "被杀死"),
    "saves": ("saves the state", "保存状态"),
    "goes on": ("state, step #40", "状态，第 40 步"),
    # beside-pytorch
    "beside-pytorch": ("The time of the same work in PyTorch and in ddp-mp", "同样的工作在 PyTorch 与 ddp-mp 中的时间"),
    "beside-pytorch.desc": (
        "Each pair of bars is one piece of work on two ranks. The upper bar is PyTorch's time, the lower bar the time of "
        "ddp-mp.",
        "每一对条形是两个 rank 上的一项工作：上面是 PyTorch 的时间，下面是 ddp-mp 的时间。",
    ),
    "the demo as a process": ("the demo, 2 epochs, with its start", "示例，2 个 epoch，含启动"),
    "Linear(20, 1)": ("a step of Linear(20, 1)", "一步：Linear(20, 1)"),
    "MLP": ("a step of an MLP, 2.1M parameters", "一步：MLP，210 万参数"),
    "CNN": ("a step of a CNN, 28 x 28 images", "一步：CNN，28 x 28 图像"),
    "GPT": ("a step of a GPT, 0.8M parameters", "一步：GPT，80 万参数"),
    "in 2 processes": ("ranks of ddp-mp: processes, too", "ddp-mp 的 rank 也是进程"),
    "times": ("{}, {} times as fast", "{}，{} 倍速度"),
}


def num(value):
    """A number as short as it can be."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def width_of(text, size):
    """The width of a text in a wide font, to find text that has no room."""
    return sum(size * (1.0 if ord(letter) > 0x2E80 else 0.58) for letter in text)


class Picture:
    """The parts of one picture in one language."""

    def __init__(self, name, language):
        self.name, self.language = name, language
        self.parts, self.height, self.title, self.desc = [], 0, self.say(name), self.say(f"{name}.desc")

    def say(self, label):
        return LABELS[label][LANGUAGES.index(self.language)]

    def rect(self, x, y, width, height, colour="box", radius=4, style=""):
        self.height = max(self.height, y + height)
        style = f" {style}" if style else ""
        self.parts.append(
            f'<rect class="{colour}" x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{num(height)}" '
            f'rx="{radius}"{style}/>'
        )

    def text(self, x, y, text, kind="text", anchor="middle", room=None):
        """Writes a text; `kind` has a class of colour and maybe `small`, `bold` or `code`."""
        size = SMALL if "small" in kind else FONT
        width = width_of(text, size)
        left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
        if left < 4 or left + width > WIDTH - 4 or (room and width > room):
            sys.exit(f"{self.name} ({self.language}): no room for {text!r}, about {width:.0f} wide")
        self.height = max(self.height, y + 4)
        self.parts.append(
            f'<text class="{kind}" x="{num(x)}" y="{num(y)}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def cell(self, x, y, width, height, text, colour="box", kind="text", style=""):
        """Draws a box with a text in its middle."""
        self.rect(x, y, width, height, colour, style=style)
        size = SMALL if "small" in kind else FONT
        self.text(x + width / 2, y + height / 2 + size * 0.36, text, kind, room=width)

    def path(self, points, line="line", head="head", both=False, is_arrow=True):
        """Draws a line through `points`, with a head at its end, and if `both` at its start."""
        self.height = max([self.height] + [y for _, y in points])
        points = list(points)
        heads = []
        for at_start in [True, False] if both else [False]:
            if not is_arrow:
                continue
            (x, y), (from_x, from_y) = (points[0], points[1]) if at_start else (points[-1], points[-2])
            length = ((x - from_x) ** 2 + (y - from_y) ** 2) ** 0.5
            dx, dy = (x - from_x) / length, (y - from_y) / length
            corners = [(x, y), (x - 8 * dx - 4 * dy, y - 8 * dy + 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy - 4 * dx)]
            heads.append(" ".join(f"{num(a)},{num(b)}" for a, b in corners))
            points[0 if at_start else -1] = (x - 6 * dx, y - 6 * dy)
        steps = " ".join(f"{'ML'[bool(index)]}{num(x)} {num(y)}" for index, (x, y) in enumerate(points))
        self.parts.append(f'<path class="{line}" d="{steps}"/>')
        self.parts.extend(f'<polygon class="{head}" points="{corners}"/>' for corners in heads)

    def svg(self):
        height = num(self.height + 16)
        light = "".join(f".{name}{{{colours[0]}}}" for name, colours in COLOURS.items())
        dark = "".join(f".{name}{{{colours[1]}}}" for name, colours in COLOURS.items())
        style = (
            f"text{{font:{FONT}px {FAMILIES[self.language]}}}.small{{font-size:{SMALL}px}}.bold{{font-weight:600}}"
            f".code{{font-family:{CODE}}}path{{fill:none;stroke-width:1.5}}{light}"
            f"@media (prefers-color-scheme:dark){{{dark}}}"
        )
        first = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
            f'role="img" lang="{self.language}">'
        )
        panel = f'<rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" height="{num(float(height) - 1)}" rx="10"/>'
        about = [f"<title>{escape(self.title)}</title>", f"<desc>{escape(self.desc)}</desc>"]
        return "\n".join([first, *about, f"<style>{style}</style>", panel, *self.parts, "</svg>"]) + "\n"


def letters(count):
    return [chr(ord("A") + index) for index in range(count)]


def data_parallel(p):
    ranks, samples = 3, 12
    left, width, gap = 150, 182, 20
    columns = [left + rank * (width + gap) for rank in range(ranks)]
    middles = [x + width / 2 for x in columns]
    whole = ranks * width + (ranks - 1) * gap

    def row(y, label, note=None):
        p.text(MARGIN, y - 3 if note else y + 5, p.say(label), "text", "start")
        if note:
            p.text(MARGIN, y + 15, p.say(note), "muted small", "start")

    row(44, "data set", "shuffled")
    each = whole / samples
    for sample in range(samples):
        p.cell(left + sample * each, 30, each, 28, str(sample), f"rank{sample % ranks}")
    for rank in range(ranks):
        x, middle = columns[rank], middles[rank]
        p.rect(x, 116, width, 212, "group", 8)
        p.text(middle, 137, f"rank {rank}", "text bold")
        for place, sample in enumerate(range(rank, samples, ranks)):
            at = x + 17 + place * 37
            p.path([(left + (sample + 0.5) * each, 60), (at + 18.5, 114)], f"line{rank}", f"head{rank}")
            p.cell(at, 146, 37, 28, str(sample), f"rank{rank}")
        p.path([(middle, 176), (middle, 200)])
        p.cell(x + 17, 202, width - 34, 34, p.say("parameters W"))
        p.path([(middle, 238), (middle, 282)])
        p.cell(x + 17, 284, width - 34, 32, f"g{rank}", f"rank{rank}")
        p.path([(middle, 318), (middle, 352)])
        p.path([(middle, 390), (middle, 420)])
        p.cell(x + 17, 422, width - 34, 32, "g", "sum")
        p.path([(middle, 456), (middle, 500)])
        p.cell(x + 17, 502, width - 34, 34, "W − lr g", "sum")
    row(160, "shard", "different")
    row(217, "replica", "the same")
    for line, key in enumerate(["forward and", "backward"]):
        p.text(MARGIN, 256 + 15 * line, p.say(key), "muted small", "start", room=left - MARGIN - 4)
    row(298, "gradient", "different")
    p.cell(left, 354, whole, 34, p.say("all-reduce mean"), "area", "text bold")
    row(438, "gradient", "the same")
    p.text(MARGIN, 482, p.say("optimizer"), "muted small", "start")
    row(519, "replica", "the same")


def ring_states(ranks):
    """The chunks of all ranks at the start and after each step, and in each step what each rank sends.

    A chunk is the letters of the ranks that have been added up, in the order of the additions.
    """
    chunks = [[letter] * ranks for letter in letters(ranks)]
    states, sent = [[list(row) for row in chunks]], []
    for step in range(2 * (ranks - 1)):
        moves = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        values = [chunks[rank][chunk] for rank, chunk in moves]
        for (rank, chunk), value in zip(moves, values):
            to = (rank + 1) % ranks
            chunks[to][chunk] = value + chunks[to][chunk] if step < ranks - 1 else value
        states.append([list(row) for row in chunks])
        sent.append(moves)
    assert all(sorted(chunk) == letters(ranks) for row in chunks for chunk in row)
    return states, sent


def ring_all_reduce(p):
    ranks = 4
    states, sent = ring_states(ranks)
    label, cell, high, row_gap, panel = 58, 35, 30, 18, 164
    for index, state in enumerate(states):
        place, top = (index, 76) if index < ranks else (index - ranks + 1, 366)
        x0 = MARGIN + label + place * panel
        rows = [top + 22 + rank * (high + row_gap) for rank in range(ranks)]
        action = "start" if index == 0 else "step add" if index < ranks else "step copy"
        p.text(x0 + 2 * cell, top - 12, p.say(action).format(index), "text bold")
        for chunk in range(ranks):
            if index == 0:
                p.text(x0 + (chunk + 0.5) * cell, top + 14, str(chunk), "muted small")
        received = {((rank + 1) % ranks, chunk) for rank, chunk in sent[index - 1]} if index else set()
        for rank in range(ranks):
            if index in [0, ranks]:
                p.text(x0 - 10, rows[rank] + high / 2 + 5, f"rank {rank}", "text", "end")
            for chunk in range(ranks):
                value = state[rank][chunk]
                colour = "box" if len(value) == 1 else "sum" if len(value) == ranks else "rank1"
                value = p.say("sum") if len(value) == ranks else value
                is_new = (rank, chunk) in received
                p.cell(
                    x0 + chunk * cell + 1,
                    rows[rank],
                    cell - 2,
                    high,
                    value,
                    colour,
                    "text small",
                    'stroke-width="3"' if is_new else "",
                )
        for rank, chunk in sent[index - 1] if index else []:
            x = x0 + (chunk + 0.5) * cell
            if rank < ranks - 1:
                p.path([(x, rows[rank] + high + 1), (x, rows[rank + 1] - 2)])
            else:
                side, low = x0 + ranks * cell + 9, rows[rank] + high
                p.path([(x, low + 1), (x, low + 10), (side, low + 10), (side, top + 4), (x, top + 4), (x, top + 20)])
    p.text(MARGIN + label + panel, 38, p.say("reduce-scatter"), "muted", "start")
    p.text(MARGIN + label + panel, 328, p.say("all-gather"), "muted", "start")
    p.text(MARGIN, 90, p.say("chunk"), "muted small", "start")
    legend = [
        ("own values", "box", ""),
        ("part of the sum", "rank1", ""),
        ("complete sum", "sum", ""),
        ("just received", "box", 'stroke-width="3"'),
    ]
    for index, (key, colour, style) in enumerate(legend):
        y = 396 + index * 34
        p.rect(MARGIN + 2, y, 24, 20, colour, style=style)
        p.text(MARGIN + 34, y + 15, p.say(key), "text small", "start", room=170)


def tree_steps(ranks):
    """The pairs (from, to) of each step, up the tree and then down."""
    up, distance = [], 1
    while distance < ranks:
        up.append([(rank, rank - distance) for rank in range(distance, ranks, 2 * distance)])
        distance *= 2
    return up, [[(to, rank) for rank, to in step] for step in reversed(up)]


def tree_all_reduce(p):
    ranks = 8
    up, down = tree_steps(ranks)
    holds = [{rank} for rank in range(ranks)]
    label, column, high, row = 96, 76, 30, 62

    def x_of(rank):
        return MARGIN + label + (rank + 0.5) * column

    def show(index, top):
        for rank in range(ranks):
            held = sorted(holds[rank])
            assert held == list(range(held[0], held[-1] + 1))
            text = (
                f"{held[0]}"
                if len(held) == 1
                else f"{held[0]} + {held[-1]}"
                if len(held) == 2
                else f"{held[0]} … {held[-1]}"
            )
            colour = "box" if len(held) == 1 else "sum" if len(held) == ranks else "rank1"
            p.cell(x_of(rank) - 31, top, 62, high, text, colour)

    for rank in range(ranks):
        p.text(x_of(rank), 40, f"rank {rank}", "text bold")
    top = 52
    show(0, top)
    p.text(MARGIN, top + 20, p.say("start"), "text", "start")
    for index, step in enumerate(up + down):
        bottom = top + row
        for source, to in step:
            x, y, x2, y2 = x_of(source), top + high + 1, x_of(to), bottom - 2
            p.path([(x, y), (x2 + (12 if x2 < x else -12), y2)])
            if index < len(up):
                holds[to] |= holds[source]
            else:
                holds[to] = set(holds[source])
        top = bottom
        show(index + 1, top)
        p.text(MARGIN, top + 20, p.say("step").format(index + 1), "text", "start")
        phase = {0: "reduce", len(up): "broadcast"}.get(index)
        if phase:
            p.text(MARGIN, top - 22, p.say(phase), "muted small", "start", room=label)
    assert all(len(held) == ranks for held in holds)


def threaded_all_reduce(p):
    ranks = 4
    label, column, high = 140, 144, 30
    for name, top in [("before", 56), ("after", 372)]:
        p.text(MARGIN, top - 12, p.say(name), "text bold", "start")
        for part in range(ranks):
            x = MARGIN + label + part * column
            p.text(x + column / 2 - 4, top - 12, f"{p.say('slice')} {part}", "muted small")
            for rank in range(ranks):
                text = (
                    f"{letters(ranks)[rank]}{part}"
                    if name == "before"
                    else "+".join(f"{it}{part}" for it in letters(ranks))
                )
                colour = f"rank{rank}" if name == "before" else "sum"
                p.cell(x, top + rank * (high + 4), column - 8, high, text, colour)
        for rank in range(ranks):
            p.text(
                MARGIN,
                top + rank * (high + 4) + 20,
                p.say("tensor of").format(rank),
                "text small",
                "start",
                room=label - 6,
            )
    for part in range(ranks):
        x = MARGIN + label + part * column + (column - 8) / 2
        p.path([(x, 194), (x, 240)])
        p.cell(MARGIN + label + part * column, 242, column - 8, 52, "", f"rank{part}")
        p.text(x, 264, f"rank {part}", "text bold")
        p.text(x, 284, p.say("reads and adds").format(part), "text small", room=column - 10)
        p.path([(x, 296), (x, 344)])
    p.text(MARGIN, 222, p.say("reads"), "muted", "start")
    p.text(MARGIN, 324, p.say("writes"), "muted", "start")


MIB = 1 << 20
# The layers of ddp-mp --model=mlp --in-features=784 --hidden=2048,2048,2048,256 --out-features=10.
SIZES = [784, 2048, 2048, 2048, 256, 10]
CAPS = [1 * MIB, 25 * MIB]


def bucket_assignment():
    """The bytes of each layer's float32 parameters, and the layers of each bucket: the rule of crates/engine/src/ddp/bucket.rs.

    A bucket is closed by the parameter with which it reaches its capacity. Here that is always a layer's weight, the
    last of the layer's parameters in this order.
    """
    layers = [4 * (inputs * outputs + outputs) for inputs, outputs in zip(SIZES, SIZES[1:])]
    buckets, now, filled = [], [], 0
    for layer in reversed(range(len(layers))):
        bias = 4 * SIZES[layer + 1]
        cap = CAPS[min(len(buckets), len(CAPS) - 1)]
        assert filled + bias < cap, "the weight closes the bucket"
        now.append(layer)
        filled += layers[layer]
        if filled >= cap:
            buckets.append(now)
            now, filled = [], 0
    return layers, buckets + ([now] if now else [])


def size(num_bytes):
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB / 10 else f"{num_bytes / 1024:.0f} KiB"


def buckets(p):
    layers, groups = bucket_assignment()
    column, box = 142.4, 124
    left = MARGIN + (column - box) / 2
    p.text(MARGIN, 40, p.say("forward order"), "text", "start")
    p.path([(WIDTH / 2 + 20, 35), (WIDTH - MARGIN, 35)])
    of_layer = {layer: index for index, group in enumerate(groups) for layer in group}
    for layer, num_bytes in enumerate(layers):
        x = left + layer * column
        p.cell(x, 54, box, 52, "", f"rank{of_layer[layer]}")
        p.text(x + box / 2, 76, p.say("layer").format(layer + 1), "text bold")
        p.text(x + box / 2, 96, size(num_bytes), "text small")
    p.text(MARGIN, 150, p.say("backward order"), "text", "start")
    p.path([(WIDTH / 2 + 20, 145), (WIDTH - MARGIN, 145)])
    order = [layer for group in groups for layer in group]
    assert order == list(reversed(range(len(layers))))
    for index, group in enumerate(groups):
        first = order.index(group[0])
        x, width = MARGIN + first * column + 2, len(group) * column - 4
        p.rect(x, 166, width, 100, "group", 8, 'stroke-width="1.5"')
        for layer in group:
            at = left + order.index(layer) * column
            p.cell(at, 176, box, 34, p.say("layer").format(layer + 1), f"rank{index}")
        num_bytes, cap = sum(layers[layer] for layer in group), CAPS[min(index, len(CAPS) - 1)]
        note = p.say("closes at" if num_bytes >= cap else "last").format(size(num_bytes), f"{cap // MIB} MiB")
        p.text(x + width / 2, 232, f"{p.say('bucket')} {index}", "text bold", room=width)
        p.text(x + width / 2, 254, note, "muted small", room=width)
        p.path([(x + width / 2, 268), (x + width / 2, 294)])
        p.cell(x + 10, 296, width - 20, 32, "all-reduce", "sum")


def overlap(p):
    _, groups = bucket_assignment()
    forward, update = 5, 3
    backward = {4: 1.5, 3: 2.5, 2: 4, 1: 4, 0: 4}
    reduce = [1.5, 4, 2]
    left, unit, high = 150, 18, 34

    def step(top, overlaps):
        def bar(row, start, length, text, colour):
            p.cell(left + start * unit, top + row * 48, length * unit - 2, high, text, colour, "text small")

        clock = forward
        p.text(left + clock * unit, top - 6, p.say("backward of layer"), "muted small", "start")
        bar(0, 0, forward, p.say("forward"), "box")
        free, ready = 0, []
        for index, group in enumerate(groups):
            for layer in group:
                bar(0, clock, backward[layer], f"{layer + 1}", f"rank{index}")
                clock += backward[layer]
            ready.append(clock)
        for index, length in enumerate(reduce):
            start = max(free, ready[index] if overlaps else clock)
            bar(1, start, length, str(index), f"rank{index}")
            if index == 0:
                p.text(left + start * unit - 8, top + 70, p.say("all-reduce of bucket"), "muted small", "end")
            if overlaps:
                x = left + ready[index] * unit - 1
                p.path([(x, top + high + 1), (x, top + 46)])
            free = start + length
        end = max(free, clock)
        bar(0, end, update, p.say("update"), "box")
        return end + update

    ends = []
    for top, key in [(72, "without overlap"), (228, "with overlap")]:
        p.text(MARGIN, top - 26, p.say(key), "text bold", "start")
        p.text(MARGIN, top + 22, p.say("computes"), "text", "start")
        p.text(MARGIN, top + 66, p.say("communicates"), "text", "start", room=left - 30)
        ends.append(step(top, key == "with overlap"))
        if key == "with overlap":
            p.text(MARGIN, top + 84, p.say("thread or stream"), "muted small", "start", room=left - MARGIN)
    late, early = (left + end * unit for end in ends)
    p.path([(early, 222), (early, 330)], is_arrow=False)
    p.path([(late, 66), (late, 330)], is_arrow=False)
    p.path([(early + 2, 284), (late - 2, 284)], both=True)
    p.text((early + late) / 2, 304, p.say("saved"), "text small")
    p.path([(left, 344), (WIDTH - MARGIN, 344)])
    p.text(MARGIN, 349, p.say("time"), "muted small", "start")


def memory_sizes(ranks):
    """The memory of each rank's own, and of what all ranks of a process share, in units of the parameters' memory."""
    parameters, gradients, state = 1, 1, 2  # AdamW keeps two numbers for each parameter
    return {
        "replicas": ([("parameters", parameters), ("gradients", gradients), ("state", state)], []),
        "--zero": ([("parameters", parameters), ("gradients", gradients), ("state", state / ranks)], []),
        "--share-model": ([("gradients", gradients)], [("parameters", parameters), ("state", state)]),
    }


def memory(p):
    ranks, unit, base, bar = 4, 48, 262, 32
    colours = {"parameters": "rank0", "gradients": "rank1", "state": "rank2"}
    sizes = memory_sizes(ranks)
    total = {
        key: ranks * sum(it for _, it in own) + sum(it for _, it in shared) for key, (own, shared) in sizes.items()
    }
    own = {key: sum(it for _, it in parts) for key, (parts, _) in sizes.items()}
    p.desc = p.desc.format(
        replica=num(own["replicas"]),
        replicas=num(total["replicas"]),
        zero=num(own["--zero"]),
        zeros=num(total["--zero"]),
        shared=num(total["--share-model"]),
    )
    for high in range(5):
        y = base - high * unit
        p.path([(MARGIN + 38, y), (WIDTH - MARGIN, y)], "grid", is_arrow=False)
        p.text(MARGIN + 30, y + 5, f"{high} P" if high else "0", "muted small", "end")
    x = MARGIN + 56
    for key, (parts, shared) in sizes.items():
        columns = [(p.say("all"), shared)] if shared else []
        columns += [(f"{rank}", parts) for rank in range(ranks)]
        start = x
        for name, stack in columns:
            y = base
            wide = bar if name.isdigit() else bar + 16
            for kind, height in stack:
                p.rect(x, y - height * unit, wide, height * unit, colours[kind], 2)
                y -= height * unit
            p.text(x + wide / 2, base + 18, name, "muted small")
            x += wide + 10
        middle = (start + x - 10) / 2
        title = p.say(key) if key in LABELS else key
        p.text(middle, base + 44, title, "text bold" if key in LABELS else "text bold code")
        p.text(middle, base + 63, p.say(f"for {key}"), "muted small")
        p.text(middle, base + 109, p.say("together").format(num(total[key])), "text")
        note = "shared by all" if shared else "each rank"
        p.text(
            middle,
            base + 88,
            p.say(note).format(num(sum(it for _, it in shared) if shared else own[key])),
            "text small",
        )
        x += 36
    x = MARGIN + 46
    for kind, colour in colours.items():
        p.rect(x, 24, 18, 18, colour)
        p.text(x + 26, 38, p.say(kind), "text small", "start")
        x += 46 + width_of(p.say(kind), SMALL)
    p.text(MARGIN, base + 140, p.say("unit"), "muted small", "start")


def collective(op, ranks):
    """What each rank has before and after, a list of cells each, and the pairs (from, to) of ranks."""
    names, everyone = letters(ranks), range(ranks)
    one = [[name] for name in names]
    lists = [[f"{name}{part}" for part in everyone] for name in names]
    whole = "+".join(names)
    out, into, pairs = (
        [(0, to) for to in everyone],
        [(source, 0) for source in everyone],
        [(source, to) for source in everyone for to in everyone],
    )
    return {
        "broadcast": (one, [["A"]] * ranks, out),
        "reduce": (one, [[whole], *one[1:]], into),
        "all_reduce": (one, [[whole]] * ranks, pairs),
        "gather": (one, [names] + [[]] * (ranks - 1), into),
        "all_gather": (one, [names] * ranks, pairs),
        "scatter": ([lists[0]] + [[]] * (ranks - 1), [[part] for part in lists[0]], out),
        "reduce_scatter": (lists, [["+".join(row[part] for row in lists)] for part in everyone], pairs),
        "all_to_all": (lists, [[row[part] for row in lists] for part in everyone], pairs),
    }[op]


def collectives(p):
    ranks, cell, high, row = 3, 32, 24, 34
    ops = ["broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter", "all_to_all"]
    for index, op in enumerate(ops):
        x, top = (MARGIN, MARGIN + 364)[index % 2], 36 + index // 2 * 172
        before, after, pairs = collective(op, ranks)
        p.text(x, top, op, "text bold code", "start")
        p.text(x, top + 20, p.say(f"op {op}"), "muted small", "start", room=352)
        first, second = x + 54, x + 54 + ranks * cell + 76
        for rank in range(ranks):
            y = top + 34 + rank * row
            p.text(x, y + 17, f"rank {rank}", "text small", "start")
            for side, rows in [(first, before), (second, after)]:
                for place, text in enumerate(rows[rank]):
                    wide = cell if len(text) <= 2 else 84
                    letter = set(text) & set(letters(ranks))
                    colour = "sum" if "+" in text else f"rank{letters(ranks).index(letter.pop())}"
                    p.cell(side + place * cell, y, wide - 2, high, text, colour, "text small")
                if not rows[rank]:
                    p.rect(side, y, cell - 2, high, "group", 4, 'stroke-dasharray="3 3"')
        for source, to in pairs:
            y1, y2 = (top + 34 + rank * row + high / 2 for rank in (source, to))
            from_x = first + len(before[source]) * cell + 3
            p.path([(from_x, y1), (second - 5, y2)], f"line{source}", f"head{source}")


def compared():
    """The rows of `BENCHMARKS` about two ranks: the work, PyTorch's time, the time of ddp-mp, and the ratio."""
    rows, work = [], ""
    table = BENCHMARKS.read_text(encoding="utf-8").split("| work | PyTorch | ddp-mp | ratio |\n", 1)[1]
    for line in table.splitlines()[1:]:
        if not line.startswith("|"):
            break
        name, pytorch, ours, ratio = (cell.strip() for cell in line.strip("|").split("|"))
        if not name[0].isdigit():
            work = next((label for label in ("the demo as a process", "Linear(20, 1)", "MLP", "CNN", "GPT") if label in name), "")
        if ratio and ("2 ranks" in name) and (work == "MLP" or "processes" not in name):
            rows.append((work, "processes" in name, pytorch, ours, ratio))
    return rows


def beside_pytorch(p):
    left, full, y = 320, 170, 40
    for work, is_processes, pytorch, ours, ratio in compared():
        seconds = [float(time.split()[0]) for time in (pytorch, ours)]
        same_unit = pytorch.split()[1] == ours.split()[1]
        if not same_unit:
            sys.exit(f"{BENCHMARKS}: {pytorch} and {ours} have different units")
        p.text(MARGIN, y + 17, p.say(work), "text", "start", room=left - MARGIN)
        if is_processes:
            p.text(MARGIN, y + 36, p.say("in 2 processes"), "muted small", "start")
        p.rect(left, y, full, 18, "area", 2)
        p.text(left + full + 8, y + 14, f"PyTorch {pytorch}", "muted small", "start")
        width = full * seconds[1] / seconds[0]
        p.rect(left, y + 22, width, 18, "sum", 2)
        p.text(left + width + 8, y + 36, p.say("times").format(f"ddp-mp {ours}", ratio), "text small", "start")
        y += 58


def machine(p, x, y, width, name, processes):
    """Draws a machine with its processes, each with a name and its ranks."""
    p.rect(x, y, width, 128, "area", 8)
    p.text(x + 10, y + 20, name, "text small", "start")
    local = 0
    inner = (width - 10 * (len(processes) + 1)) / len(processes)
    for index, (title, ranks) in enumerate(processes):
        left = x + 10 + index * (inner + 10)
        p.rect(left, y + 30, inner, 88, "box", 6)
        p.text(left + inner / 2, y + 49, title, "muted small", room=inner)
        wide = (inner - 8 * (len(ranks) + 1)) / len(ranks)
        for place, rank in enumerate(ranks):
            p.cell(left + 8 + place * (wide + 8), y + 62, wide, 44, "", f"rank{rank}")
            p.text(left + 8 + place * (wide + 8) + wide / 2, y + 81, f"rank {rank}", "text small bold", room=wide)
            p.text(left + 8 + place * (wide + 8) + wide / 2, y + 98, f"local rank {local}", "text small", room=wide)
            local += 1


def launchers(p):
    process = p.say("process")
    width, half = WIDTH - 2 * MARGIN, (WIDTH - 2 * MARGIN - 16) / 2
    layouts = [
        ("threads of one process", ["ddp-mp --nproc-per-node=4"], [[[0, 1, 2, 3]]]),
        (
            "processes of one machine",
            [
                "ddp-mp --nproc-per-node=4 --spawn=processes",
                "torchrun --standalone --no-python --nproc-per-node=4 ddp-mp",
            ],
            [[[0], [1], [2], [3]]],
        ),
        ("Slurm, one task", ["srun --nodes=2 --ntasks-per-node=1 ddp-mp --nproc-per-node=2"], [[[0, 1]], [[2, 3]]]),
        ("Slurm, two tasks", ["srun --nodes=2 --ntasks-per-node=2 ddp-mp"], [[[0], [1]], [[2], [3]]]),
    ]
    top = 40
    for title, commands, machines in layouts:
        p.text(MARGIN, top, p.say(title), "text bold", "start")
        for command in commands:
            top += 20
            p.text(MARGIN, top, command, "muted small code", "start")
        top += 12
        number = 0
        for index, processes in enumerate(machines):
            wide = width if len(machines) == 1 else half
            named = []
            for ranks in processes:
                named.append((f"{process} {number}", ranks))
                number += 1
            machine(p, MARGIN + index * (half + 16), top, wide, f"{p.say('machine')} {index}", named)
        top += 162


def what_moves_where(p):
    half, gap = 290, 132
    for index in range(2):
        x = MARGIN + index * (half + gap)
        p.rect(x, 24, half, 262, "area", 8)
        p.text(x + half / 2, 46, f"{p.say('machine')} {index}", "text bold")
        p.rect(x + 14, 122, half - 28, 152, "group", 6, 'stroke-dasharray="5 4"')
        p.text(x + half / 2, 264, p.say("shared memory"), "muted small")
        for place in range(2):
            rank, left = 2 * index + place, x + 14 + place * 136
            p.rect(left, 58, 126, 48, "box", 6)
            p.text(left + 63, 77, f"{p.say('process')} {rank}", "muted small")
            p.text(left + 63, 96, f"rank {rank}", "text")
            p.path([(left + 63, 107), (left + 63, 134)], is_arrow=False)
            p.cell(left + 23, 134, 80, 32, f"g{rank}", f"rank{rank}")
            p.path([(left + 63, 168), (left + 63, 204)], both=True)
        sums = [p.say("sum of the machine").format(0, 1), p.say("mean of all")]
        p.cell(x + 28, 206, half - 56, 36, sums[index], "sum")
    left, middle = MARGIN + half - 26, MARGIN + half + gap / 2
    p.path([(left, 224), (left + gap + 52, 224)], both=True)
    p.text(middle, 212, p.say("sum and mean"), "text small", room=gap - 4)
    p.text(middle, 245, "TCP (Gloo)", "muted small")
    for index, key in enumerate(["mean on each", "sends", "writes back"]):
        p.text(MARGIN, 318 + 22 * index, p.say(key), "text small", "start")


def after_a_failure(p):
    state, work, save, again = (96, 104), (236, 160), (432, 136), (608, 128)
    columns = [(state, "after step"), (work, "in step"), (save, "first back"), (again, "restart")]
    for (x, width), key in columns:
        p.text(x + width / 2, 40, p.say(key), "muted small")
    middles = [56 + 62 * rank + 20 for rank in range(3)]
    for rank, middle in enumerate(middles):
        top = middle - 20
        p.text(MARGIN, middle + 5, f"rank {rank}", "text bold", "start")
        p.cell(state[0], top, state[1], 40, p.say("whole state"), "sum", "text small")
        p.path([(sum(state) + 2, middle), (work[0] - 2, middle)])
        doing, colour = ("dies", "rank3") if rank == 1 else ("waits", "area")
        p.cell(work[0], top, work[1], 40, p.say(doing), colour, "text small")
        turn = (sum(save) + again[0]) / 2
        p.path([(sum(save) + 2, middles[0]), (turn, middles[0]), (turn, middle), (again[0] - 2, middle)])
        p.cell(again[0], top, again[1], 40, p.say("goes on"), "sum", "text small")
    p.path([(sum(work) + 2, middles[0]), (save[0] - 2, middles[0])])
    p.cell(save[0], middles[0] - 20, save[1], 40, p.say("saves"), "sum", "text small bold")


def one_wrong_number(p):
    """Rank 1 has one wrong gradient. Which parts of the step, and of the next one, differ then."""
    columns = ["samples", "layers", "loss", "gradient", "average", "parameters"]
    left, wide, gap, high = 96, 88, 16, 40
    middles = [88 + 64 * rank for rank in range(2)]
    for rank, middle in enumerate(middles):
        p.text(MARGIN, middle + 5, f"rank {rank}", "text bold", "start")
    wrong = {"gradient": [1], "average": [0, 1], "parameters": [0, 1]}
    for place, column in enumerate(columns):
        x = left + place * (wide + gap)
        p.text(x + wide / 2, 52, p.say(column), "muted small", room=wide + gap - 4)
        for rank, middle in enumerate(middles):
            is_wrong = rank in wrong.get(column, [])
            colour, text = ("rank3", "other") if is_wrong else ("sum", "the same")
            p.cell(x, middle - high / 2, wide, high, p.say(text), colour, "text small")
        if place == 0:
            continue
        for rank, middle in enumerate(middles):
            for source, of_source in enumerate(middles):
                if source == rank or column == "average":
                    p.path([(x - gap + 1, of_source), (x - 2, middle)])
    first = left + columns.index("gradient") * (wide + gap)
    p.rect(first - 5, middles[1] - high / 2 - 5, wide + 10, high + 10, "group", 6, 'stroke-dasharray="5 4"')
    p.text(first + wide / 2, middles[1] + 46, p.say("the cause"), "text small bold", room=2 * wide)
    p.text(left + 4.5 * (wide + gap) + wide / 2, middles[1] + 46, p.say("consequences"), "muted small", room=3 * wide)
    p.text(MARGIN, middles[1] + 84, p.say("next step"), "text small", "start")


DRAWINGS = [
    one_wrong_number,
    data_parallel,
    ring_all_reduce,
    tree_all_reduce,
    threaded_all_reduce,
    buckets,
    overlap,
    memory,
    collectives,
    launchers,
    what_moves_where,
    after_a_failure,
    beside_pytorch,
]


def main():
    is_check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not is_check:
        sys.exit(__doc__)
    wrong = []
    for draw in DRAWINGS:
        for language in LANGUAGES:
            picture = Picture(draw.__name__.replace("_", "-"), language)
            draw(picture)
            path = FOLDER / f"{picture.name}{'' if language == 'en' else f'.{language}'}.svg"
            text = picture.svg()
            if not is_check:
                path.write_text(text, encoding="utf-8")
            elif not path.exists() or path.read_text(encoding="utf-8") != text:
                wrong.append(f"{path} differs: run python3 docs/pictures.py")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
