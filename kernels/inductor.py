"""Backend "inductor": the twins' maths compiled by torch.compile, fused over pieces of a bucket that stay in the cache.

On a CPU this is the fast path, on a GPU what the kernels have to beat. Every function is compiled once, for any number
of blocks; whatever changes between steps is a tensor. Parameters and gradients are copied piece by piece into scratch
of a piece's size, unless a piece lies within one tensor: the compiled code has no addresses.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import TensorPropertySource

from . import lamb_reference, momentum_reference, server_reference, variance_reference
from .gradients_reference import sum_of_squares
from .planes_reference import header, pack_planes, planes, unpack_planes
from .tables import BlockMap, Clip, Decision, Rate, TensorTable, flat

PIECE_ELEMENTS = {"cpu": 512 * 1024, "cuda": 4 * 1024 * 1024}
"""Elements of a piece by device: a few arrays of them fit a last-level cache, and outweigh the cost of a call."""

ALONE = 64 * 1024
"""Elements from which on a tensor makes a group of its own: it can be used where it is, which is worth a call more."""

PLANE_DTYPE = {"cpu": torch.float32, "cuda": torch.uint8}
"""Type that planes have in scratch, by device. Inductor's C++ loads fp32 in one instruction, narrower types in ten."""


def require_compiler(device: torch.device) -> None:
    """Check that compiled code can be built for a device.

    Raises:
        RuntimeError: on a CPU without a C++ compiler.
    """
    if device.type != "cpu":
        return
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, exc.CppCompileError, OSError) as error:
        raise RuntimeError(
            "backend='inductor' compiles C++ on a CPU and found no working compiler: install g++ or clang, or point "
            "CXX at one; backend='torch' needs none."
        ) from error


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive blocks of a bucket.

    Attributes:
        blocks: which blocks; rows: the same, counted from the start of the group; elements: which elements.
        count: how many blocks.
        spans: (segment, start and stop in its tensor, start in the piece) of each segment's part.
        gaps: (start, stop) in the piece of what no tensor fills.
    """

    blocks: slice
    rows: slice
    elements: slice
    count: int
    spans: tuple[tuple[int, int, int, int], ...]
    gaps: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Group:
    """Small consecutive segments that fit one piece, or one large segment in one or more pieces.

    Attributes:
        segments: which segments; blocks: which blocks of the bucket.
        map: block map of those blocks: segments as numbered in the bucket, blocks counted from the group's first.
        member: int64 [blocks], segments counted from the group's first.
        pieces: their pieces; backwards: the same, last first.
    """

    segments: slice
    blocks: slice
    map: BlockMap
    member: Tensor
    pieces: tuple[Piece, ...]
    backwards: tuple[Piece, ...]


@cache
def plan_groups(
    sizes: tuple[int, ...], starts: tuple[int, ...], blocks: int, block_elements: int, piece_elements: int,
    device: torch.device,
) -> tuple[Group, ...]:  # fmt: skip
    """Cut a bucket into groups and pieces; padding goes with the last segment."""
    limit = max(1, piece_elements // block_elements)
    first = [*(start // block_elements for start in starts), blocks]
    groups, segment = [], 0
    while segment < len(sizes):
        stop = segment + 1
        while sizes[segment] < ALONE and stop < len(sizes) and sizes[stop] < ALONE:
            if first[stop + 1] - first[segment] > limit:
                break
            stop += 1
        counts = [first[number + 1] - first[number] for number in range(segment, stop)]
        pieces = []
        for at in range(first[segment], first[stop], limit):
            until = min(at + limit, first[stop])
            low, high = at * block_elements, until * block_elements
            spans, gaps, filled = [], [], 0
            for number in range(segment, stop):
                begin, end = max(low, starts[number]), min(high, starts[number] + sizes[number])
                if begin < end:
                    if filled < begin - low:
                        gaps.append((filled, begin - low))
                    spans.append((number, begin - starts[number], end - starts[number], begin - low))
                    filled = end - low
            if filled < high - low:
                gaps.append((filled, high - low))
            rows = slice(at - first[segment], until - first[segment])
            pieces.append(Piece(slice(at, until), rows, slice(low, high), until - at, tuple(spans), tuple(gaps)))
        group_map = BlockMap(
            segment=torch.repeat_interleave(torch.arange(segment, stop), torch.tensor(counts)).to(device),
            first_block=torch.tensor([0, *counts]).cumsum(0).to(device),
            numel=torch.tensor(sizes[segment:stop]).to(device),
            sizes=sizes[segment:stop],
            starts=tuple((block - first[segment]) * block_elements for block in first[segment:stop]),
            block_elements=block_elements,
        )
        groups.append(
            Group(
                segments=slice(segment, stop),
                blocks=slice(first[segment], first[stop]),
                map=group_map,
                member=group_map.segment - segment,
                pieces=tuple(pieces),
                backwards=tuple(reversed(pieces)),
            )
        )
        segment = stop
    return tuple(groups)


def _commit(destination: Tensor, new: Tensor, decision: Tensor) -> None:
    destination.copy_(torch.where(decision[Decision.SKIP] != 0, destination, new))


def _of_segment(segment: Tensor, segments: int) -> Tensor:
    """Which blocks [1, n] belong to which segment [segments, 1], bool."""
    return torch.arange(segments, device=segment.device).unsqueeze(1) == segment.unsqueeze(0)


def _spread(values: Tensor, member: Tensor) -> Tensor:
    """One value per segment for each of its blocks, [blocks, 1]; a sum of one value and zeros, so exact."""
    return torch.where(member, values.unsqueeze(1), 0.0).sum(0).unsqueeze(1)


# What is compiled. Tensors whose first dimension is the number of blocks come first, then those with one row a segment;
# row, clip and scales are as in the twins; sums are of blocks; state is overwritten unless the step is skipped.


def _norms(g: Tensor, sums: Tensor) -> None:
    sums.copy_(sum_of_squares(g).unsqueeze(1))


def _moments(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, row: Tensor, sums: Tensor, clip: Tensor, decision: Tensor,
    bias_correction: bool,
) -> None:  # fmt: skip
    m_new, v_new, u = lamb_reference.moments(p, g * clip[Clip.GRAD_SCALE], m, v, row, bias_correction)
    sums.copy_(torch.stack((sum_of_squares(p), sum_of_squares(u)), 1))
    _commit(m, m_new, decision)
    _commit(v, v_new, decision)


def _trust_ratio(hyper: Tensor, rates: Tensor, p_squares: Tensor, u_squares: Tensor, decision: Tensor) -> None:
    _commit(rates, lamb_reference.trust_ratio(p_squares, u_squares, hyper, rates), decision)


def _apply(
    p: Tensor, m: Tensor, v: Tensor, row: Tensor, segment: Tensor, rates: Tensor, decision: Tensor,
    bias_correction: bool,
) -> None:  # fmt: skip
    rate = _spread(rates[:, Rate.RATE], _of_segment(segment, rates.shape[0]))
    _commit(p, lamb_reference.apply(p, m, v, row, rate, bias_correction), decision)


def _moments_and_ratio(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    row: Tensor,
    update: Tensor,
    segment: Tensor,
    hyper: Tensor,
    rates: Tensor,
    clip: Tensor,
    decision: Tensor,
    bias_correction: bool,
) -> None:
    m_new, v_new, u = lamb_reference.moments(p, g * clip[Clip.GRAD_SCALE], m, v, row, bias_correction)
    _commit(m, m_new, decision)
    _commit(v, v_new, decision)
    update.copy_(u)
    member = _of_segment(segment, rates.shape[0])
    p_squares, u_squares = (torch.where(member, sum_of_squares(x).unsqueeze(0), 0.0).sum(1) for x in (p, u))
    _commit(rates, lamb_reference.trust_ratio(p_squares, u_squares, hyper, rates), decision)


def _step(p: Tensor, update: Tensor, segment: Tensor, rates: Tensor, decision: Tensor) -> None:
    rate = _spread(rates[:, Rate.RATE], _of_segment(segment, rates.shape[0]))
    _commit(p, p - rate * update, decision)


def _compress(
    g: Tensor, x: Tensor, old: Tensor, row: Tensor, new: Tensor, sums: Tensor, x_scale: Tensor, clip: Tensor, l1: bool
) -> None:
    m = unpack_planes(old.to(torch.int32), row[:, 3:])
    compensated, *both = momentum_reference.compensate(g * clip[Clip.GRAD_SCALE], m, x, x_scale, row, l1)
    new.copy_(pack_planes(compensated, torch.int32).to(new.dtype))
    sums.copy_(torch.stack(both, 1))
    x.copy_(compensated)


def _undo(g: Tensor, x: Tensor, old: Tensor, row: Tensor, clip: Tensor, decision: Tensor) -> None:
    m = unpack_planes(old.to(torch.int32), row[:, 3:])
    undone = momentum_reference.take_back(g * clip[Clip.GRAD_SCALE], m, x, row)
    x.copy_(torch.where(decision[Decision.SKIP] != 0, undone, x))


def _serve(
    received: Tensor, y: Tensor, sent: Tensor, sums: Tensor, scales: Tensor, y_scale: Tensor, decision: Tensor, l1: bool
) -> None:
    new, sizes = server_reference.serve(received.to(torch.int32).transpose(0, 1), scales, y, y_scale, l1)
    _commit(sent, pack_planes(new, torch.int32).to(sent.dtype), decision)
    sums.copy_(sizes.unsqueeze(1))
    _commit(y, new, decision)


def _refresh(
    p: Tensor, old: Tensor, new: Tensor, v: Tensor, v_fresh: Tensor, row: Tensor, exchange_row: Tensor,
    sums: Tensor, decision: Tensor, bias_correction: bool,
) -> None:  # fmt: skip
    squares, m = variance_reference.decode(old.to(torch.int32), new.to(torch.int32), exchange_row)
    _reduce(p, m, squares, v, v_fresh, row, sums, decision, bias_correction)


def _dense_momentum(
    g: Tensor, m: Tensor, v: Tensor, row: Tensor, squares: Tensor, clip: Tensor, decision: Tensor
) -> None:
    found, m_new = variance_reference.dense_momentum(g * clip[Clip.GRAD_SCALE], m, v, row)
    squares.copy_(found)
    _commit(m, m_new, decision)


def _refresh_dense(
    p: Tensor, m: Tensor, squares: Tensor, v: Tensor, v_fresh: Tensor, row: Tensor, sums: Tensor, decision: Tensor,
    bias_correction: bool,
) -> None:  # fmt: skip
    numerator = m / row[:, 6:7] if bias_correction else m
    _reduce(p, numerator, squares, v, v_fresh, row, sums, decision, bias_correction)


def _reduce(
    p: Tensor, m: Tensor, squares: Tensor, v: Tensor, v_fresh: Tensor, row: Tensor, sums: Tensor, decision: Tensor,
    bias_correction: bool,
) -> None:  # fmt: skip
    fresh = variance_reference.fresh(squares, v, v_fresh, row)
    fresh = torch.where(decision[Decision.SKIP] != 0, v_fresh, fresh)
    v_fresh.copy_(fresh)
    _, *found = variance_reference.layer_sums(p, m, v, fresh, row, bias_correction)
    sums.copy_(torch.stack(found, 1))


def _soft_threshold_rate(
    hyper: Tensor, rates: Tensor, factor: Tensor, up_squares: Tensor, u_squares: Tensor, p_squares: Tensor,
    decision: Tensor,
) -> None:  # fmt: skip
    rate = variance_reference.soft_threshold_rate(factor, up_squares, u_squares, p_squares, hyper, rates)
    _commit(rates, rate, decision)


def _refresh_and_rate(
    p: Tensor, old: Tensor, new: Tensor, v: Tensor, v_fresh: Tensor, row: Tensor, exchange_row: Tensor,
    update: Tensor,
    segment: Tensor, hyper: Tensor, rates: Tensor, decision: Tensor, bias_correction: bool,
) -> None:  # fmt: skip
    skip = decision[Decision.SKIP] != 0
    squares, m = variance_reference.decode(old.to(torch.int32), new.to(torch.int32), exchange_row)
    fresh = torch.where(skip, v_fresh, variance_reference.fresh(squares, v, v_fresh, row))
    v_fresh.copy_(fresh)
    u, ratio, *sums = variance_reference.layer_sums(p, m, v, fresh, row, bias_correction)
    update.copy_(u)
    member = _of_segment(segment, rates.shape[0])
    factor = torch.where(member, ratio.unsqueeze(0), 0.0).amax(1)
    up_squares, u_squares, p_squares = (torch.where(member, one.unsqueeze(0), 0.0).sum(1) for one in sums)
    rate = variance_reference.soft_threshold_rate(factor, up_squares, u_squares, p_squares, hyper, rates)
    _commit(rates, rate, decision)


def _move(
    p: Tensor, new: Tensor, v: Tensor, row: Tensor, exchange_row: Tensor, segment: Tensor, rates: Tensor,
    decision: Tensor, bias_correction: bool,
) -> None:  # fmt: skip
    rate = _spread(rates[:, Rate.RATE], _of_segment(segment, rates.shape[0]))
    m = unpack_planes(new.to(torch.int32), exchange_row[:, 2:])
    _commit(p, variance_reference.move(p, m, v, row, rate, bias_correction), decision)


def _move_dense(
    p: Tensor, m: Tensor, v: Tensor, row: Tensor, segment: Tensor, rates: Tensor, decision: Tensor,
    bias_correction: bool,
) -> None:  # fmt: skip
    rate = _spread(rates[:, Rate.RATE], _of_segment(segment, rates.shape[0]))
    numerator = m / row[:, 6:7] if bias_correction else m
    _commit(p, variance_reference.move(p, numerator, v, row, rate, bias_correction), decision)


class Compiled:
    """A function, compiled when it is first called, for any number of blocks and of segments.

    torch.compile takes size 1 for a constant. So functions of one segment are compiled besides those of many, and those
    of one block, which is next to nothing, run as they are. What it compiles is then called without its wrapper, which
    looks at every argument anew and costs more than the work on a small tensor: all that may change here is sizes.

    Args:
        function: what to compile.
        blocks: how many of its first arguments have a row for each block.
        segments: how many of those that follow have a row for each segment.
    """

    def __init__(self, function: Callable[..., Any], blocks: int, segments: int = 0) -> None:
        self._function, self._blocks, self._segments = function, blocks, segments
        self._names = list(inspect.signature(function).parameters)
        self._compiled = torch.compile(function, backend=self._backend, fullgraph=True)
        self._code: dict[tuple[object, ...], Callable[..., Any]] = {}
        self._latest: Any = None

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Inductor; remembers what it made as a function of this function's arguments."""
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(graph, inputs)
        takes = [self._place(node.meta["grapharg"].source) for node in graph.graph.find_nodes(op="placeholder")]
        self._latest = lambda *args: compiled(
            *(args[i] if dim is None else args[i].shape[dim] for i, dim in takes)  # tensors, and their sizes
        )
        return compiled

    def _place(self, source: Any) -> tuple[int, int | None]:
        """Which argument an input of the graph is, or which argument's which size."""
        if isinstance(source, TensorPropertySource):
            base: Any = source.base
            return self._names.index(base.local_name), source.idx
        return self._names.index(source.local_name), None

    def __call__(self, *args: Any) -> None:
        """Call the function on its arguments: tensors of one device, then flags."""
        if self._blocks and args[0].shape[0] == 1:
            self._function(*args)
            return
        many = bool(self._segments) and args[self._blocks].shape[0] > 1
        key = (many, args[0].shape[1:], args[0].device.type, args[-1] if isinstance(args[-1], bool) else None)
        code = self._code.get(key)
        if code is not None:
            code(*args)
            return
        for tensor in args[: self._blocks + self._segments * many]:
            torch._dynamo.mark_dynamic(tensor, 0)
        self._latest = None
        self._compiled(*args)
        if self._latest is not None:
            self._code[key] = self._latest


NORMS = Compiled(_norms, 2)
MOMENTS_AND_RATIO = Compiled(_moments_and_ratio, 7, 2)
STEP = Compiled(_step, 3, 1)
MOMENTS = Compiled(_moments, 6)
TRUST_RATIO = Compiled(_trust_ratio, 0, 4)
APPLY = Compiled(_apply, 5, 1)
COMPRESS = Compiled(_compress, 6)
UNDO = Compiled(_undo, 4)
SERVE = Compiled(_serve, 4)
REFRESH_AND_RATE = Compiled(_refresh_and_rate, 9, 2)
REFRESH = Compiled(_refresh, 8)
DENSE_MOMENTUM = Compiled(_dense_momentum, 5)
REFRESH_DENSE = Compiled(_refresh_dense, 7)
SOFT_THRESHOLD_RATE = Compiled(_soft_threshold_rate, 0, 6)
MOVE = Compiled(_move, 6, 1)
MOVE_DENSE = Compiled(_move_dense, 5, 1)


class InductorPasses:
    """The passes that stages call, under their names; signatures as in the modules that `backends.PASSES` lists.

    Those that are a few operations on small tensors, or run once after a switch, are the twins as they are.

    Args:
        device: where all tensors are.
        twins: the plain-torch passes.
    """

    name = "inductor"

    def __init__(self, device: torch.device, twins: Any) -> None:
        require_compiler(device)
        self._device, self._twins = device, twins
        self._piece_elements = PIECE_ELEMENTS[device.type]
        self._plane_dtype = PLANE_DTYPE[device.type]
        self._scratch: dict[str, Tensor] = {}
        for name in (
            "seal_worker", "seal_server", "decide_averaged", "clip_local", "decide_exchanged", "accept_returned",
        ):  # fmt: skip
            setattr(self, name, getattr(twins, name))

    # Copies between where things are and scratch

    def _buffer(self, slot: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Scratch of a shape; allocated once, as large as it was ever needed."""
        size = math.prod(shape)
        held = self._scratch.get(slot)
        if held is None or held.numel() < size:
            held = self._scratch[slot] = torch.empty(size, dtype=dtype, device=self._device)
        return held[:size].view(shape)

    def _groups(self, blocks: BlockMap) -> tuple[Group, ...]:
        return plan_groups(
            blocks.sizes, blocks.starts, blocks.blocks, blocks.block_elements, self._piece_elements, self._device
        )

    def _pieces(self, blocks: BlockMap) -> list[Piece]:
        return [piece for group in self._groups(blocks) for piece in group.pieces]

    @staticmethod
    def _whole(table: TensorTable, piece: Piece) -> Tensor | None:
        """The tensor that a piece lies in, where it can be used as it is."""
        if len(piece.spans) == 1 and not piece.gaps and table.dtype == torch.float32:
            return table.tensors[piece.spans[0][0]]
        return None

    def _read(self, table: TensorTable, blocks: BlockMap, piece: Piece, slot: str) -> Tensor:
        """A piece of a table's tensors, fp32 [blocks, B]: a view, or a copy in scratch."""
        shape = (piece.count, blocks.block_elements)
        whole = self._whole(table, piece)
        if whole is not None:
            _, start, stop, _ = piece.spans[0]
            return flat(whole)[start:stop].view(shape)
        out = self._buffer(slot, shape)
        line = out.view(-1)
        for start, stop in piece.gaps:
            line[start:stop].zero_()
        for number, start, stop, at in piece.spans:
            tensor = table.tensors[number]
            part = line[at : at + stop - start]
            if tensor is None:
                part.zero_()
            else:
                part.copy_(flat(tensor)[start:stop])
        return out

    def _write(self, table: TensorTable, copies: TensorTable | None, piece: Piece, values: Tensor) -> None:
        """Bring a piece that was read back to the tensors, unless it is a view of one, and to their copies."""
        line = values.view(-1)
        written = [] if self._whole(table, piece) is not None else [table]
        for target in written if copies is None else [*written, copies]:
            for number, start, stop, at in piece.spans:
                tensor = target.tensors[number]
                if tensor is not None:
                    flat(tensor)[start:stop].copy_(line[at : at + stop - start])

    def _read_planes(self, messages: Tensor, blocks: BlockMap, slot: str) -> Tensor:
        """The planes of a bucket's messages in scratch, [blocks, B/8]."""
        out = self._buffer(slot, (blocks.blocks, blocks.block_elements // 8), self._plane_dtype)
        out.view(messages.shape[0], -1).copy_(planes(messages))
        return out

    # The passes

    def flatten_gradients(self, grads: TensorTable, blocks: BlockMap, out: Tensor, ranks: int) -> None:
        """As in gradients.py."""
        for piece in self._pieces(blocks):
            g = self._read(grads, blocks, piece, "g")
            torch.div(g, g.new_full((), ranks), out=out[piece.elements].view(g.shape))

    def gradient_norms(self, grads: TensorTable, blocks: BlockMap, partials: Tensor) -> None:
        """As in gradients.py."""
        sums = partials.view(-1, 1)
        for piece in self._pieces(blocks):
            NORMS(self._read(grads, blocks, piece, "g"), sums[piece.blocks])

    def lamb_update(
        self, params: TensorTable, copies: TensorTable | None, grads: TensorTable, blocks: BlockMap, exp_avg: Tensor,
        exp_avg_sq: Tensor, hyper: Tensor, rates: Tensor, clip: Tensor, decision: Tensor, partials: Tensor,
        bias_correction: bool,
    ) -> None:  # fmt: skip
        """As in updates.py."""
        row = lamb_reference.block_rows(blocks, hyper, rates, advance=True)
        m, v = (state.view(blocks.blocks, -1) for state in (exp_avg, exp_avg_sq))
        sums = self._buffer("sums2", (blocks.blocks, 2))
        for group in self._groups(blocks):
            tables = hyper[group.segments], rates[group.segments]
            if len(group.pieces) == 1:
                piece, at = group.pieces[0], group.blocks
                p, g = self._read(params, blocks, piece, "p"), self._read(grads, blocks, piece, "g")
                update, member = self._buffer("update", p.shape), group.member
                state = p, g, m[at], v[at], row[at], update, member
                MOMENTS_AND_RATIO(*state, *tables, clip, decision, bias_correction)
                STEP(p, update, member, tables[1], decision)
                self._write(params, copies, piece, p)
                continue
            for piece in group.pieces:
                at = piece.blocks
                p, g = self._read(params, blocks, piece, "p"), self._read(grads, blocks, piece, "g")
                MOMENTS(p, g, m[at], v[at], row[at], sums[at], clip, decision, bias_correction)
            squares = sums[group.blocks].sum(0)
            TRUST_RATIO(*tables, squares[:1], squares[1:], decision)
            for piece in group.backwards:
                at, p = piece.blocks, self._read(params, blocks, piece, "p")
                APPLY(p, m[at], v[at], row[at], group.member[piece.rows], tables[1], decision, bias_correction)
                self._write(params, copies, piece, p)

    def compress_momentum(
        self, grads: TensorTable, blocks: BlockMap, x: Tensor, x_scale: Tensor, old_messages: Tensor,
        exp_avg: Tensor | None, hyper: Tensor, rates: Tensor, clip: Tensor, new_messages: Tensor, partials: Tensor,
        l1: bool = False,
    ) -> None:  # fmt: skip
        """As in momentum.py."""
        if exp_avg is not None:
            self._twins.compress_momentum(
                grads, blocks, x, x_scale, old_messages, exp_avg, hyper, rates, clip, new_messages, partials, l1
            )
            return
        row = momentum_reference.momentum_rows(blocks, old_messages, hyper, rates)
        old = self._read_planes(old_messages, blocks, "old")
        new = self._buffer("new", old.shape, self._plane_dtype)
        sums, x = self._buffer("sums2", (blocks.blocks, 2)), x.view(blocks.blocks, -1)
        for piece in self._pieces(blocks):
            at, g = piece.blocks, self._read(grads, blocks, piece, "g")
            COMPRESS(g, x[at], old[at], row[at], new[at], sums[at], x_scale, clip, l1)
        planes(new_messages).copy_(new.view(new_messages.shape[0], -1))
        partials.copy_(sums.t())

    def undo_momentum(
        self, grads: TensorTable, blocks: BlockMap, x: Tensor, x_scale: Tensor, old_messages: Tensor,
        exp_avg: Tensor | None, hyper: Tensor, rates: Tensor, clip: Tensor, decision: Tensor,
    ) -> None:  # fmt: skip
        """As in momentum.py."""
        if x.device.type == "cpu" and not decision[Decision.SKIP]:
            return  # here the host need not wait to know
        if exp_avg is not None:
            self._twins.undo_momentum(grads, blocks, x, x_scale, old_messages, exp_avg, hyper, rates, clip, decision)
            return
        row = momentum_reference.momentum_rows(blocks, old_messages, hyper, rates)
        old, x = self._read_planes(old_messages, blocks, "old"), x.view(blocks.blocks, -1)
        for piece in self._pieces(blocks):
            at, g = piece.blocks, self._read(grads, blocks, piece, "g")
            UNDO(g, x[at], old[at], row[at], clip, decision)
        x_scale.copy_(torch.where(decision[Decision.SKIP] != 0, 0.0, x_scale))

    def reduce_chunk(
        self, received: Tensor, y: Tensor, y_scale: Tensor, decision: Tensor, message: Tensor, partials: Tensor,
        block_elements: int, l1: bool = False,
    ) -> None:  # fmt: skip
        """As in server.py."""
        ranks, count, quarter = received.shape[0], partials.numel(), block_elements // 8
        packed = self._buffer("received", (count, ranks, quarter), self._plane_dtype)
        packed.copy_(planes(received).unflatten(1, (count, quarter)).transpose(0, 1))
        answer = planes(message.unsqueeze(0)).view(count, quarter)
        sent = self._buffer("new", (count, quarter), self._plane_dtype)
        sent.copy_(answer)
        sums, y, scales = partials.view(-1, 1), y.view(count, block_elements), header(received, 0).contiguous()
        limit = max(1, self._piece_elements // block_elements)
        for start in range(0, count, limit):
            at = slice(start, start + limit)
            SERVE(packed[at], y[at], sent[at], sums[at], scales, y_scale, decision, l1)
        answer.copy_(sent)

    def compressed_update(
        self, params: TensorTable, copies: TensorTable | None, grads: TensorTable | None, blocks: BlockMap,
        old_messages: Tensor, new_messages: Tensor, exp_avg: Tensor | None, exp_avg_sq: Tensor,
        exp_avg_sq_fresh: Tensor, hyper: Tensor, rates: Tensor, clip: Tensor, decision: Tensor, partials: Tensor,
        bias_correction: bool,
    ) -> None:  # fmt: skip
        """As in updates.py."""
        if grads is not None:
            assert exp_avg is not None
            self._uncompressed_update(
                params, copies, grads, blocks, exp_avg, exp_avg_sq, exp_avg_sq_fresh, hyper, rates, clip, decision,
                bias_correction,
            )  # fmt: skip
            return
        if exp_avg is not None:
            self._twins.compressed_update(
                params, copies, grads, blocks, old_messages, new_messages, exp_avg, exp_avg_sq, exp_avg_sq_fresh, hyper,
                rates, clip, decision, partials, bias_correction,
            )  # fmt: skip
            return
        row = lamb_reference.block_rows(blocks, hyper, rates)
        exchanged = variance_reference.exchange_rows(blocks, old_messages, new_messages, hyper, rates, bias_correction)
        old, new = self._read_planes(old_messages, blocks, "old"), self._read_planes(new_messages, blocks, "new")
        v, v_fresh = (state.view(blocks.blocks, -1) for state in (exp_avg_sq, exp_avg_sq_fresh))
        sums = self._buffer("sums4", (blocks.blocks, 4))
        for group in self._groups(blocks):
            tables = hyper[group.segments], rates[group.segments]
            if len(group.pieces) == 1:
                piece, at = group.pieces[0], group.blocks
                p = self._read(params, blocks, piece, "p")
                update, member = self._buffer("update", p.shape), group.member
                state = p, old[at], new[at], v[at], v_fresh[at], row[at], exchanged[at], update, member
                REFRESH_AND_RATE(*state, *tables, decision, bias_correction)
                STEP(p, update, member, tables[1], decision)
                self._write(params, copies, piece, p)
                continue
            for piece in group.pieces:
                at, p = piece.blocks, self._read(params, blocks, piece, "p")
                REFRESH(
                    p, old[at], new[at], v[at], v_fresh[at], row[at], exchanged[at], sums[at], decision,
                    bias_correction,
                )  # fmt: skip
            ratio, up, u, p = sums[group.blocks].split(1, 1)
            SOFT_THRESHOLD_RATE(*tables, ratio.amax(0), up.sum(0), u.sum(0), p.sum(0), decision)
            for piece in group.backwards:
                at, p = piece.blocks, self._read(params, blocks, piece, "p")
                MOVE(
                    p, new[at], v[at], row[at], exchanged[at], group.member[piece.rows], tables[1], decision,
                    bias_correction,
                )  # fmt: skip
                self._write(params, copies, piece, p)
        lamb_reference.commit(old_messages, new_messages, decision)

    def _uncompressed_update(
        self, params: TensorTable, copies: TensorTable | None, grads: TensorTable, blocks: BlockMap, exp_avg: Tensor,
        exp_avg_sq: Tensor, exp_avg_sq_fresh: Tensor, hyper: Tensor, rates: Tensor, clip: Tensor, decision: Tensor,
        bias_correction: bool,
    ) -> None:  # fmt: skip
        row = lamb_reference.block_rows(blocks, hyper, rates)
        m, v, v_fresh = (state.view(blocks.blocks, -1) for state in (exp_avg, exp_avg_sq, exp_avg_sq_fresh))
        sums = self._buffer("sums4", (blocks.blocks, 4))
        for group in self._groups(blocks):
            for piece in group.pieces:
                at = piece.blocks
                p, g = self._read(params, blocks, piece, "p"), self._read(grads, blocks, piece, "g")
                squares = self._buffer("squares", p.shape)
                DENSE_MOMENTUM(g, m[at], v[at], row[at], squares, clip, decision)
                REFRESH_DENSE(p, m[at], squares, v[at], v_fresh[at], row[at], sums[at], decision, bias_correction)
            ratio, *sums_of_squares = sums[group.blocks].unbind(1)
            per_segment = group.map.max(ratio), *(group.map.sum(one) for one in sums_of_squares)
            SOFT_THRESHOLD_RATE(hyper[group.segments], rates[group.segments], *per_segment, decision)
            for piece in group.backwards:
                at, p = piece.blocks, self._read(params, blocks, piece, "p")
                member, table = group.member[piece.rows], rates[group.segments]
                MOVE_DENSE(p, m[at], v[at], row[at], member, table, decision, bias_correction)
                self._write(params, copies, piece, p)
