"""How bf12_linear_hopper.py divides a matrix: tiles, warpgroups and escapes, which thread has which number, and how a
thread decodes its words. It reads no weights.

Which row of a warpgroup's matmul is which output is free, since words come through shared memory. So an output is
beside its neighbour in one thread (or a gate beside its up), and threads that read at once read different banks.

L lanes, M rows of a warpgroup's matmul.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engine.bf12.layout import GROUP_OUTPUTS

GROUP = gl.constexpr(64)  # a warpgroup's outputs, in two pieces
PIECE = gl.constexpr(32)
_LISTED = gl.constexpr(GROUP_OUTPUTS)


@gluon.constexpr_function
def decoding(q):
    """PTX: bf16 of numbers 2q ($0) and 2q + 1 ($1) of a pair of lanes, of their words of high halves ($2, $3) and of
    low bytes ($4, $5), and of the row's base ($6)."""
    high, low = f"${2 + q // 2}", f"${4 + q % 2}"
    turn = f"shf.l.wrap.b32 four, {high}, {high}, 28;" if q % 2 else f"mov.b32 four, {high};"
    counted = f"prmt.b32 $0, {low}, four, 0x5140; prmt.b32 $1, {low}, four, 0x7362;"
    numbers = "mad.lo.u32 $0, $6, 0x00800080, $0; mad.lo.u32 $1, $6, 0x00800080, $1;"
    return f"{{ .reg .b32 four; {turn} and.b32 four, four, 0x87878787; {counted} {numbers} }}"


@gluon.constexpr_function
def row_bits(gated):
    """For each bit of an output's place among a warpgroup's 64, from the lowest: the M that it stands for.

    M's bit 8 is within a thread, 1, 2 and 4 are a warp's threads, 16 and 32 its warps. Threads that read at once differ
    in 1 and 2: these are the bits of places that swizzled memory keeps apart."""
    return (16, 1, 2, 4, 32, 8) if gated else (8, 1, 2, 4, 16, 32)


@gluon.constexpr_function
def words_bases(lanes, gated):
    """For each bit of a word's position in shared memory its [M, word], where TMA has swizzled rows of L words."""
    swizzled = (4, 8, 16, 0, 0, 0) if lanes == 32 else (0, 4, 8, 0, 0, 0)
    within = [[0, 1 << bit] for bit in range(lanes.bit_length() - 1)]
    return within + [[row, word] for row, word in zip(row_bits(gated), swizzled, strict=True)]


@gluon.constexpr_function
def words_layout(lanes, gated):
    return gl.SharedLinearLayout(words_bases(lanes, gated), [], 1024)


@gluon.constexpr_function
def place_order(gated):
    """The order of six dimensions, M's bits from the highest, that makes them the bits of places."""
    return tuple(6 - row.bit_length() for row in reversed(row_bits(gated)))


@gluon.constexpr_function
def stored_layout(rows, gated):
    """[outputs, rows] in the threads that have their sums: M's bit 8 puts two outputs beside each other, unless these
    are a gate and its up, which are one by then."""
    of_m = {m: [1 << bit, 0] for bit, m in enumerate(row_bits(gated)) if not (gated and m == 8)}
    across = [[0, 1 << bit] for bit in range(rows.bit_length() - 1)]
    registers = [*([] if gated else [of_m[8]]), across[0], *across[3:]]
    lanes = [across[1], across[2], of_m[1], of_m[2], of_m[4]]
    return gl.DistributedLinearLayout(registers, lanes, [of_m[16], of_m[32]], [], [32 if gated else 64, rows])


@gluon.jit
def item_of(item, blocks, row_tiles, output_tiles, together, parts):
    """(tile of rows, tile of outputs, part, its first block, its last): those that share words run at once."""
    part, tile = item // (row_tiles * output_tiles), item % (row_tiles * output_tiles)
    first = tile // (together * output_tiles) * together
    height = gl.minimum(row_tiles - first, together)
    within = tile - first * output_tiles
    return first + within % height, within // height, part, blocks * part // parts, blocks * (part + 1) // parts


@gluon.jit
def pieces_of(output_tile, inner, WARPGROUP: gl.constexpr, GATED: gl.constexpr):
    """The first outputs of a warpgroup's two pieces: 64 outputs, or gates and their ups."""
    if GATED:
        first = output_tile * GROUP + WARPGROUP * PIECE
        second = inner + first
    else:
        first = output_tile * (2 * GROUP) + WARPGROUP * GROUP
        second = first + PIECE
    return first, second


@gluon.jit
def escapes_of(firsts, N, start):
    """(first escape, end of escapes) of the piece of 32 outputs from `start` on."""
    groups = (N + _LISTED - 1) // _LISTED
    first = gl.load(firsts + gl.minimum(start // _LISTED, groups))
    return first, gl.load(firsts + gl.minimum((start + PIECE) // _LISTED, groups))


@gluon.jit
def share_of(count, part, parts):
    """(from, to): a part's share of a warpgroup's escapes."""
    return count * part // parts, count * (part + 1) // parts
