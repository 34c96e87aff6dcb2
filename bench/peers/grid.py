# SPDX-License-Identifier: Apache-2.0
"""What side_by_side.py measures, and what we want to reach: sets of tests, and targets."""
from dataclasses import dataclass

KI, MI = 1024, 1024 * 1024
OPS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
SIZES = (4, 96, KI, 4 * KI, 12 * KI, 64 * KI, 300 * KI, MI, 5 * MI, 16 * MI, 100 * MI, 256 * MI)
TYPES = ("float32", "float16", "bfloat16", "int8", "float64")
FEW_SIZES = (4 * KI, 300 * KI, 16 * MI)


def resnet50():
    """Bytes of the 161 gradients of a ResNet-50 as they come: from the last layer to the first."""
    shapes = [64 * 3 * 49, 64, 64]
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for n, wide in ((inside * width, width), (width * width * 9, width),
                            (width * width * 4, 4 * width)):
                shapes += [n, wide, wide]
            if block == 0:
                shapes += [inside * width * 4, 4 * width, 4 * width]
            inside = 4 * width
    shapes += [2048 * 1000, 1000]
    return [4 * n for n in reversed(shapes)]


def transformer(layers=25, width=128):
    """400 gradients: attention and two dense layers with their biases, and two norms, a layer."""
    layer = [width * width, width] * 4 + [width * 4 * width, 4 * width] + [width * 4 * width, width]
    return [4 * n for n in (layer + [width] * 4) * layers]


def embeddings(tables=26, rows=128, width=64):
    """What a rank has to say of sparse gradients: for each table, row numbers and their values."""
    return [8 * rows, 4 * rows * width] * tables


# name -> operation, bytes of each tensor
MANY = {
    "500 x 40 B": ("many", [40] * 500),
    "500 x 10 KiB": ("many", [10 * KI] * 500),
    "ResNet-50": ("many", resnet50()),
    "transformer": ("many", transformer()),
    "embeddings": ("many-gather", embeddings()),
}


@dataclass(frozen=True)
class Test:
    op: str
    bytes: int  # of the tensor; of all together where there are many
    dtype: str = "float32"
    many: str = ""  # a name of MANY


@dataclass(frozen=True)
class Set:
    ranks: int
    net: str  # local, or two namespaces: veth, veth1g, veth10g
    tests: tuple
    ours: tuple = ("ours",)
    peers: bool = True
    floor: bool = False  # also time a plain memcpy on every rank at once

    @property
    def per_host(self):
        return self.ranks if self.net == "local" else self.ranks // 2


def tests(ops=OPS, sizes=SIZES, dtypes=("float32",), most=SIZES[-1]):
    return tuple(Test(op, s, d) for d in dtypes for op in ops for s in sizes if s <= most)


def alone_of(test):
    """One tensor, for two ranks, with the bytes of all: no library can do much better."""
    if test.op == "many":
        return Test("allreduce", test.bytes)
    return Test("allgather", 2 * test.bytes)  # of the result


def many():
    for name, (op, sizes) in MANY.items():
        test = Test(op, sum(sizes), many=name)
        yield from (test, alone_of(test))


WITH_ENCRYPTED = ("ours", "ours-encrypted")
SETS = {
    "local2": Set(2, "local", tests(), floor=True),
    "local3": Set(3, "local", tests()),
    "local4": Set(4, "local", tests()),
    "types": Set(2, "local", tests(("allreduce",), FEW_SIZES, TYPES)),
    "many": Set(2, "local", tuple(many())),
    "veth": Set(2, "veth", tests(), WITH_ENCRYPTED),
    "veth-2x2": Set(4, "veth", tests(), WITH_ENCRYPTED),
    "veth10g": Set(2, "veth10g", tests(), WITH_ENCRYPTED),
    "veth1g": Set(2, "veth1g", tests(most=16 * MI), WITH_ENCRYPTED),
    "veth-many": Set(2, "veth", tuple(many()), WITH_ENCRYPTED),
}

# What we want to reach: subject / reference, at most. The first row that fits counts; None fits
# every operation.
BEST = "best peer"
LOCAL_SUMS = {4: 1.0, 96: 1.0, KI: 1.0, 4 * KI: 1.0, 12 * KI: 0.9, 64 * KI: 0.9, 300 * KI: 0.8,
              MI: 0.8, 5 * MI: 0.7, 16 * MI: 0.7, 100 * MI: 0.6, 256 * MI: 0.6}
WIRE_SUMS = {4: 1.0, 96: 1.0, KI: 1.0, 4 * KI: 1.0, 12 * KI: 1.0, 64 * KI: 1.0, 300 * KI: 0.9,
             MI: 0.9, 5 * MI: 0.7, 16 * MI: 0.7, 100 * MI: 0.65, 256 * MI: 0.65}
AHEAD = dict.fromkeys(SIZES, 0.9)
EQUAL = dict.fromkeys(SIZES, 1.0)
FROM_1_MIB = {s: 1.3 for s in SIZES if s >= MI}
TARGETS = (
    # set         operation      subject           reference       limit by bytes, or one for all
    ("local2", "allreduce", "ours", BEST, LOCAL_SUMS),
    ("local2", None, "ours", BEST, AHEAD),
    ("local2", None, "ours", "memcpy", FROM_1_MIB),
    ("local3", "allreduce", "ours", BEST, LOCAL_SUMS),
    ("local3", None, "ours", BEST, EQUAL),
    ("local4", "allreduce", "ours", BEST, LOCAL_SUMS),
    ("local4", None, "ours", BEST, EQUAL),
    ("types", None, "ours", "ours float32", 1.2),
    ("many", "many", "ours", BEST, 0.5),
    ("many", "many-gather", "ours", BEST, 0.5),
    ("many", "many", "ours", "one tensor", 1.5),
    ("many", "many-gather", "ours", "one tensor", 1.5),
    ("veth", "allreduce", "ours", BEST, WIRE_SUMS),
    ("veth", None, "ours", BEST, EQUAL),
    ("veth", None, "ours-encrypted", "ours", {16 * MI: 1.4, 100 * MI: 1.4}),
    ("veth-2x2", "allreduce", "ours", BEST, WIRE_SUMS),
    ("veth-2x2", None, "ours", BEST, EQUAL),
    ("veth10g", None, "ours", BEST, EQUAL),
    ("veth1g", None, "ours", BEST, EQUAL),
    ("veth-many", "many", "ours", BEST, 0.5),
    ("veth-many", "many-gather", "ours", BEST, 0.5),
)


def limit_for(name, subject, reference, test):
    for n, op, s, r, limits in TARGETS:
        if (n, s, r) == (name, subject, reference) and op in (None, test.op):
            return limits.get(test.bytes) if isinstance(limits, dict) else limits
    return None
