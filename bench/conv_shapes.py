"""Problems for compare_gpu.py and conv_plans.py: 3-D convolutions and transposed convolutions."""

import math
import random
import re
from typing import NamedTuple, Union

Sizes = Union[int, tuple]


def triple(v):
    """Returns a tuple of three numbers; an int stands for three equal numbers."""
    return (v,) * 3 if isinstance(v, int) else tuple(v)


def text(v):
    """Returns "3" for equal numbers, otherwise for example "1,3,3"."""
    v = triple(v)
    return str(v[0]) if len(set(v)) == 1 else ",".join(map(str, v))


def sizes(text_of_sizes):
    """Returns the sizes that text() describes. Raises ValueError unless there are one or three numbers."""
    numbers = tuple(map(int, text_of_sizes.split(",")))
    if len(numbers) not in (1, 3):
        raise ValueError(f"expected one or three sizes, got '{text_of_sizes}'")
    return numbers[0] if len(numbers) == 1 else numbers


class Shape(NamedTuple):
    """The arguments of a convolution, as in PyTorch. An int applies to all three axes."""
    batch: int
    cin: int
    cout: int
    size: Sizes
    kernel: Sizes
    stride: Sizes = 1
    padding: Sizes = 0
    output_padding: Sizes = 0
    dilation: Sizes = 1
    groups: int = 1
    transposed: bool = True

    def output_size(self):
        n, k, s, p, op, d = map(triple, self[3:9])
        if self.transposed:
            return tuple((n[a] - 1) * s[a] - 2 * p[a] + d[a] * (k[a] - 1) + op[a] + 1 for a in range(3))
        return tuple((n[a] + 2 * p[a] - d[a] * (k[a] - 1) - 1) // s[a] + 1 for a in range(3))

    def weight_size(self):
        first, second = (self.cin, self.cout) if self.transposed else (self.cout, self.cin)
        return (first, second // self.groups, *triple(self.kernel))

    def elements(self):
        """Returns the number of elements of the input and the output together."""
        return self.batch * (self.cin * math.prod(triple(self.size)) + self.cout * math.prod(self.output_size()))

    def flop(self):
        """Returns the FLOP of the forward pass, and also of each gradient."""
        voxels = triple(self.size) if self.transposed else self.output_size()
        return 2 * self.batch * math.prod(voxels) * math.prod(self.weight_size())

    def describe(self):
        """Returns a short text such as "T 4x256>128 16 k4 s2 p1".

        The text contains T for a transposed convolution or C for a convolution, the batch, the channels, the size, the
        kernel, and the arguments that differ from their defaults.
        """
        rest = zip(("s", "p", "op", "d", "g"), self[5:10], (1, 0, 0, 1, 1))
        unusual = [key + text(value) for key, value, usual in rest if text(value) != text(usual)]
        channels = f"{'T' if self.transposed else 'C'} {self.batch}x{self.cin}>{self.cout}"
        return " ".join([channels, text(self.size), f"k{text(self.kernel)}", *unusual])

    @staticmethod
    def parse(description):
        """Returns the shape that describe() describes. Raises ValueError if the text is not such a description."""
        match = re.fullmatch(r"([CT]) (\d+)x(\d+)>(\d+) ([\d,]+) k([\d,]+)((?: (?:op|s|p|d|g)[\d,]+)*)", description)
        if not match:
            raise ValueError(f"expected a problem such as 'T 4x256>128 16 k4 s2 p1', got '{description}'")
        kind, batch, cin, cout, size, kernel, rest = match.groups()
        names = {"s": "stride", "p": "padding", "op": "output_padding", "d": "dilation", "g": "groups"}
        others = {names[key]: sizes(value) for key, value in re.findall(r" ([a-z]+)([\d,]+)", rest)}
        return Shape(int(batch), int(cin), int(cout), sizes(size), sizes(kernel), transposed=kind == "T", **others)


def mirror(shape):
    """Returns the transposed convolution that maps the output shape of a convolution to the input shape.

    If the kernel has size 1, the channels are not exchanged, so that a transposed head() also has few output channels.
    """
    n, k, s, p, _, d = map(triple, shape[3:9])
    remainder = tuple((n[a] + 2 * p[a] - d[a] * (k[a] - 1) - 1) % s[a] for a in range(3))
    cin, cout = (shape.cin, shape.cout) if math.prod(k) == 1 else (shape.cout, shape.cin)
    return shape._replace(cin=cin, cout=cout, size=shape.output_size(), output_padding=remainder, transposed=True)


# The arguments are the fields of Shape in their order. Names such as L2-61 denote KernelBench's problems
# (L<level>-<problem>).
PEERS = {
    "L1-58": Shape(16, 32, 16, (16, 32, 64), (3, 5, 7)),
    "L1-61": Shape(8, 48, 48, 64, 3),
    "L1-68": Shape(16, 32, 64, 64, (3, 5, 5)),
    "L1-70": Shape(8, 48, 24, 96, 3),
    "L1-72": Shape(8, 32, 32, (12, 24, 48), (3, 5, 7), 2, (1, 2, 3), 1, 1, 4),
    "L1-73": Shape(4, 32, 32, (32, 64, 128), 3, 2, 1, 0, 1, 4),
    "L1-77": Shape(16, 32, 64, (16, 32, 32), 3, 2, 1, 0, 2),
    "L2-61": Shape(16, 64, 128, 32, 3),
    "L2-100": Shape(16, 64, 128, (24, 48, 48), 3, 2, 1),
    "L2-78": Shape(16, 32, 64, 32, 5, 2, 2),
    "L2-72": Shape(64, 3, 16, 32, 3, 2, 1),
    "dec256": Shape(4, 256, 128, 16, 4, 2, 1),
    "dec64": Shape(4, 64, 32, 64, 4, 2, 1),
}
# Further problems: batch 1, powers of two, odd sizes and channels, few and many channels.
BEYOND = {
    "one48": Shape(1, 48, 48, 64, 3),
    "one-dec": Shape(1, 128, 64, 32, 4, 2, 1),
    "pow32": Shape(8, 32, 32, 32, 3, 1, 1),
    "pow64": Shape(2, 64, 64, 64, 3, 1, 1),
    "pow128": Shape(1, 16, 16, 128, 3, 1, 1),
    "odd33": Shape(4, 33, 17, (31, 37, 41), 3, 1, 1),
    "odd-s2": Shape(2, 65, 31, (23, 29, 19), 5, 2, 2, 1),
    "odd-s3": Shape(2, 24, 40, (17, 21, 25), 5, 3, 1, 2),
    "k1": Shape(4, 128, 64, 48, 1),
    "wide": Shape(1, 256, 256, 24, 3, 1, 1),
    "few": Shape(4, 16, 3, 64, 3, 1, 1),
    "depthwise": Shape(4, 32, 32, 64, 3, 1, 1, 0, 1, 32),
    "few-s2": Shape(2, 16, 16, (32, 64, 64), 4, 2, 1),
}
# Volumes of increasing depth. The time should grow with the depth.
SWEEP = {f"depth{d}": Shape(2, 48, 48, (d, 48, 48), 3, 1, 1) for d in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)}


def nnunet():
    """Returns the layers of nnU-Net's plain U-Net for two patches of 128^3 voxels: encoder, decoder and head."""
    width = {128: 32, 64: 64, 32: 128, 16: 256, 8: 320, 4: 320}  # channels by size of the level
    conv = lambda cin, cout, size, stride=1: Shape(2, cin, cout, size, 3, stride, 1, transposed=False)
    shapes = {"first": conv(1, 32, 128)}
    for size, c in width.items():
        if size < 128:
            shapes[f"down{size}"] = conv(width[2 * size], c, 2 * size, 2)
        shapes[f"same{size}"] = conv(c, c, size)
        if size > 4:
            shapes[f"cat{size}"] = conv(2 * c, c, size)
    for size in (4, 8, 16, 32, 64):
        shapes[f"up{2 * size}"] = Shape(2, width[size], width[2 * size], size, 2, 2)
    return {**shapes, "head": Shape(2, 32, 3, 128, 1, transposed=False)}


def mednext():
    """Returns the depthwise layers of a MedNeXt with 32 channels for two patches of 128^3 voxels.

    For the kernel sizes 3 and 5, each level has a layer with stride 1 ("same"), a layer to the next level ("down") and
    a layer from the next level ("up"). One further layer has kernel size 7.
    """
    shapes = {}
    for kernel in (3, 5):
        for level, size in enumerate((128, 64, 32, 16, 8)):
            c = 32 << level
            conv = Shape(2, c, c, size, kernel, 1, kernel // 2, groups=c, transposed=False)
            shapes[f"k{kernel}-same{size}"] = conv
            if size > 8:
                shapes[f"k{kernel}-down{size}"] = conv._replace(stride=2)
                shapes[f"k{kernel}-up{size}"] = mirror(conv._replace(stride=2))
    return {**shapes, "k7-same64": Shape(2, 64, 64, 64, 7, 1, 3, groups=64, transposed=False)}


def families():
    """Returns a few layers of each family of convolutions that has its own kernels or its own difficulty."""
    groups = {
        "depthwise": "C 2x48>48 96 k3 p1 g48; C 2x96>96 48 k5 p2 g96; C 2x48>48 96 k7 p3 g48; "
                     "C 2x48>48 96 k5 s2 p2 g48; T 2x96>96 48 k5 s2 p2 op1 g96; T 2x96>96 48 k3 s2 p1 op1 g96",
        "few-inputs": "C 2x1>24 128 k3 p1; C 2x4>48 96 k3 p1; C 2x2>32 128 k5 s2 p2; C 4x3>64 96 k7 s2 p3",
        "few-outputs": "C 2x48>2 96 k1; C 2x32>3 128 k3 p1; C 2x48>1 96 k5 p2; T 2x64>3 48 k4 s2 p1",
        "patches": "C 2x1>96 128 k4 s4; C 8x3>384 8,128,128 k2,4,4 s2,4,4; C 2x48>96 96 k2 s2; T 2x96>48 48 k2 s2; "
                   "T 2x96>1 32 k4 s4",
        "k1": "C 2x48>48 96 k1; C 2x96>192 64 k1; C 4x256>128 40 k1; C 8x512>512 16 k1",
        "strided": "C 2x48>96 128 k3 s2 p1; T 2x96>48 64 k3 s2 p1 op1; T 4x64>32 64 k4 s2 p1",
        "small": "C 2x256>256 12 k3 p1; C 4x384>384 6 k3 p1; C 2x512>512 5 k3 p1; T 4x512>256 6 k2 s2",
    }
    return {f"{name}{i}": Shape.parse(text.strip()) for name, list_of_texts in groups.items()
            for i, text in enumerate(list_of_texts.split(";"))}


def slow():
    """Returns layers of earlier races on which some version of voxgrad was slower than PyTorch."""
    texts = ("C 64x128>256 16 k2 s2; T 64x256>128 8 k2 s2; C 64x512>512 8 k3 s2 p1; C 16x512>512 3 k3 p1; "
             "T 32x512>512 3 k3 p1; T 2x256>128 16,128,128 k3,1,1 p1,0,0; T 4x256>128 5,96,96 k3,1,1; "
             "T 64x512>256 6 k3 s2 p1 op1; T 64x512>384 4 k3 s2 p1 op1; C 4x256>512 24 k3 s2 p1; "
             "C 16x384>512 6 k3 s2 p1; C 64x128>256 12 k3 s2 p1; C 16x128>256 24 k3 s2 p1; C 16x512>512 4 k3 p1; "
             "C 4x256>512 16 k3 s2 p1; T 1x128>128 20,128,128 k3,3,1 p1,1,0; C 16x32>64 64 k3 s2 p1; "
             "T 4x512>512 4 k3 p1; T 1x512>512 4 k3 p1; T 2x129>99 41,67,29 k3 p1; C 64x128>128 24 k3 s2 p2 d2; "
             "C 32x256>256 12 k3 p1; C 2x2>32 64 k4 s2 p1; C 8x96>192 32 k3 s2 p1; T 1x128>128 31 k3 p2 d2; "
             "C 4x128>128 31 k3 p3 d3; C 64x96>192 24 k3 s2 p1; C 32x128>256 8,96,96 k1,2,2 s1,2,2; "
             "T 16x384>512 8 k3 p1; C 32x512>512 8 k3 s2 p1; C 1x16>14 128 k1; C 2x48>14 40,160,160 k1; C 2x64>2 96 k1; "
             "C 2x64>2 128 k1; T 4x64>1 96 k1; C 4x64>4 40,160,160 k1")
    return {text: Shape.parse(text) for text in texts.split("; ")}


# The rest of the file implements --set race: random layers similar to the layers of real models. Each function from
# encoder() to five() returns a random convolution of one family, with batch 1. `pick` returns one of its arguments at
# random. race() selects the batch and converts every other problem to a transposed convolution.

def conv(cin, cout, size, kernel, stride=1, padding=None, dilation=1, groups=1):
    """Returns a convolution with "same" padding unless `padding` is given."""
    if padding is None:
        padding = tuple(d * (k // 2) for d, k in zip(triple(dilation), triple(kernel)))
    return Shape(1, cin, cout, size, kernel, stride, padding, 0, dilation, groups, False)


def encoder(pick):
    """Returns a convolution of a U-Net.

    The convolution has stride 1, or stride 1 and twice as many input as output channels (after a skip connection), or
    stride 2. Deeper levels have more channels and fewer voxels.
    """
    depth = pick(*range(6))
    c, size = min(512, pick(16, 24, 32, 64) << depth), pick(128, 128, 96) >> depth
    cin, cout, stride = pick((c, c, 1), (2 * c, c, 1), (c, 2 * c, 2))
    return conv(min(cin, 512), min(cout, 512), size, 3, stride)


def resampling(pick):
    """Returns a downsampling layer with kernel 2 or 4 and stride 2.

    race() also converts such layers to the upsampling layers of a decoder.
    """
    cin, cout, size = pick((256, 512, 8), (128, 256, 16), (64, 128, 32), (32, 64, 64), (pick(1, 2, 16), 32, 64))
    return conv(cin, cout, size, *pick((2, 2, 0), (4, 2, 1)))


def anisotropic(pick):
    c = pick(16, 32, 64, 128)
    size = (pick(8, 16, 20, 40), *(pick(32, 48, 64, 96, 128, 160),) * 2)
    kernel, stride = pick(((1, 3, 3), 1), ((3, 3, 1), 1), ((3, 1, 1), 1), ((1, 3, 3), (1, 2, 2)),
                          ((3, 3, 3), (1, 2, 2)), ((1, 2, 2), (1, 2, 2)))
    return conv(c, c * pick(1, 2), size, kernel, stride, 0 if kernel == (1, 2, 2) else None)


def head(pick):
    return conv(pick(16, 32, 48, 64), pick(1, 2, 3, 4, 5, 14), pick(64, 96, 128, (40, 160, 160)), 1)


def first(pick):
    size = pick(32, 64, 96, 128, (32, 160, 160), (31, 63, 95))
    return conv(pick(1, 2, 3, 4), pick(16, 24, 32, 64), size, pick(3, 5, 7), pick(1, 2))


def dilated(pick):
    c = pick(32, 48, 64, 128, 256)
    return conv(c, c * pick(1, 1, 2), pick(16, 24, 31, 48, 64), 3, pick(1, 1, 1, 2), dilation=pick(2, 3))


def grouped(pick):
    c = pick(32, 64, 96, 128, 256)
    return conv(c, c, pick(8, 16, 32, 45, 64), pick(3, 3, 5), pick(1, 1, 2), groups=pick(2, 4, 8, c))


def depthwise(pick):
    """Returns a depthwise layer of a MedNeXt, with stride 1 within a level or stride 2 between two levels."""
    depth = pick(*range(5))
    c, size = pick(16, 32, 48) << depth, pick(128, 96) >> depth
    return conv(c, c, size, pick(3, 5, 5, 7), pick(1, 1, 2), groups=c)


def odd(pick):
    channels = lambda: pick(13, 17, 23, 31, 33, 47, 65, 99, 129)
    axis = lambda: pick(9, 13, 19, 23, 29, 33, 41, 55, 67, 81)
    return conv(channels(), channels(), (axis(), axis(), axis()), pick(3, 3, 5), pick(1, 1, 1, 2, 2, 3))


def patches(pick):
    """Returns a patch embedding of a volume or a video: the stride equals the kernel.

    race() also converts such layers to layers that map a token to a patch.
    """
    size, kernel = pick((128, 4), (96, 2), (160, 8), (128, 16), ((8, 128, 128), (2, 4, 4)), ((16, 224, 224), (2, 16, 16)))
    return conv(pick(1, 2, 3, 4), pick(32, 48, 96, 192, 384), size, kernel, kernel, 0)


def video(pick):
    """Returns a layer of a network for videos of 1 to 8 frames, with separate kernels for space and time or with a
    causal convolution, whose input is padded in time before the convolution."""
    c, frames, side = pick(64, 128, 256, 512), pick(1, 2, 3, 4, 5, 8), pick(16, 32, 64, 96)
    kernel, padding = pick(((1, 3, 3), (0, 1, 1)), ((1, 3, 3), 0), ((3, 1, 1), 0), ((3, 3, 3), (0, 1, 1)))
    return conv(c, c * pick(1, 1, 2), (frames + kernel[0] - 1, side, side), kernel, 1, padding)


def five(pick):
    c = pick(16, 32, 48, 64, 128)
    return conv(c, c * pick(1, 1, 2), pick(16, 24, 32, 48, 64), 5, pick(1, 1, 2))


# The families of convolutions and of transposed convolutions, in the order in which race() uses them.
CONVOLUTIONS = (encoder, encoder, anisotropic, first, dilated, depthwise, grouped, odd, head, resampling, patches, video,
                five)
MIRRORED = (resampling, resampling, anisotropic, encoder, grouped, depthwise, odd, dilated, first, head, patches, video,
            five)
MAX_BYTES = 2e9  # maximum size of the input and the output together, in float32
MAX_FLOP = 2.5e11


def race(seed, count):
    """Returns `count` random problems, alternately convolutions and transposed convolutions.

    The problems are the same in every version of Python, because they depend only on Random.random().
    """
    generator = random.Random(seed)
    pick = lambda *options: options[int(generator.random() * len(options))]

    def fits(shape):
        slow = 1 if shape.groups == 1 else 8  # problems with groups are 8 times smaller, because cuDNN is slow
        return 4 * shape.elements() * slow <= MAX_BYTES and shape.flop() * slow <= MAX_FLOP

    drawn = {}
    while len(drawn) < count:
        i = len(drawn)
        family = (MIRRORED if i % 2 else CONVOLUTIONS)[i // 2 % len(CONVOLUTIONS)]
        shape = family(pick)
        batches = [n for n in (1, 2, 4, 8, 16, 32, 64) if fits(shape._replace(batch=n))]
        if not batches:
            continue
        shape = shape._replace(batch=pick(*batches))
        shape = mirror(shape) if i % 2 else shape
        if shape not in drawn.values():
            drawn[f"r{i:02}-{family.__name__}"] = shape
    return drawn


SETS = {"peers": PEERS, "beyond": BEYOND, "sweep": SWEEP, "nnunet": nnunet(), "mednext": mednext(),
        "families": families(), "slow": slow()}


def add_options(parser, default):
    """Adds the options that select problems. `default` is the default of --set."""
    parser.add_argument("--set", choices=[*SETS, "race"], default=default,
                        help=f"problems of bench/conv_shapes.py; race: random problems (default: {default})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random problems of --set race")
    parser.add_argument("--count", type=int, default=60, help="number of problems of --set race")
    parser.add_argument("--shapes", nargs="+", metavar="NAME",
                        help="problems to run, by their names or in the form of the tables: 'C 2x256>256 16 k3 p1' "
                        "(default: all of --set)")


def selected(parser, options):
    """Returns the problems that the options of add_options() select, by name. Calls parser.error() for other names."""
    shapes = race(options.seed, options.count) if options.set == "race" else SETS[options.set]
    known = {name: shape for each in (*SETS.values(), shapes) for name, shape in each.items()}
    for name in options.shapes or ():
        if name not in known:
            try:
                known[name] = Shape.parse(name)
            except ValueError as error:
                parser.error(f"--shapes: {error}, which is not one of {', '.join(known)} either")
    return {name: known[name] for name in options.shapes or shapes}
