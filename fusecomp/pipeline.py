"""The story on one page: from a captured graph to one in which attention runs as fused kernels.

    capture     Dynamo's graph in a small ATen vocabulary            graph/capture.py
    recognise   softmax(f(Q K^T)) V, as mathematics                  patterns/attention.py
    lower       plan tiles within the SRAM budget,                   planning/plan.py
                emit a specialised kernel as readable text,          codegen/emit.py, codegen/backward.py
                load it from a private, content-addressed file       running/loader.py
    verify      against the program as written, in float64           running/verify.py
    substitute  the kernel's operator for the nodes                  running/substitute.py
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusecomp.errors import CaptureError, FusecompError, KernelError, VerificationError
from fusecomp.graph.capture import capture, may_hold_attention, without_dead_code
from fusecomp.graph.facts import Place, place, word
from fusecomp.graph.learning import mark, records
from fusecomp.graph.rewriting import put_back
from fusecomp.patterns.apart import found_apart, own_operands, withdraw
from fusecomp.patterns.attention import Declined, recognise
from fusecomp.patterns.build import Match
from fusecomp.patterns.sdpa import plain_calls
from fusecomp.patterns.written import write_out
from fusecomp.planning import unfused
from fusecomp.planning.device import current
from fusecomp.report import Entry
from fusecomp.running import hopper, launching, library
from fusecomp.running.lower import Lowered, lower, planned, real_tensors, triton_interprets
from fusecomp.running.operator import Kernel, at_home, register
from fusecomp.running.subgraph import seen
from fusecomp.running.substitute import substitute
from fusecomp.running.verdict import Verdict
from fusecomp.running.verify import verify
from fusecomp.settings import Options

log = logging.getLogger(__name__)
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Compilation:
    """One graph, compiled: what is handed on, and what is told about it."""

    module: GraphModule
    entries: tuple[Entry, ...] = ()

    @property
    def fused(self) -> int:
        return sum(e.status == "fused" for e in self.entries)


def compile_graph(gm: GraphModule, values: Sequence[Any], options: Options) -> Compilation:
    """`gm` with each recognised attention replaced. `values` are the fake tensors and numbers of its inputs.

    Where nothing is replaced, the module handed on is `gm` itself, untouched.
    """
    if not may_hold_attention(gm):
        return Compilation(gm)
    launching.ahead()
    try:
        captured = capture(gm, values)
    except CaptureError as error:
        return unread(gm, error, "declined")
    entries, taken = list[Entry](), set[Node]()
    mark(captured, values)  # for what is rewritten; and again for what that adds
    written = write_out(captured, lambda name, error: entries.append(unwritten(name, error, options)))
    entries += plain_sdpa(captured)
    mark(captured, values)
    for found in recognise(captured):
        entry = declined(found, options) if isinstance(found, Declined) else compile_match(captured, found, options)
        if entry.status == "fused" and isinstance(found, Match):
            taken.add(found.output)
        entries.append(entry)
    put_back(captured, written, taken)
    without_dead_code(captured)
    entries = [replace(e, index=i) for i, e in enumerate(entries)]
    return Compilation(captured if taken else gm, tuple(entries))


@at_home
def compile_match(module: GraphModule, match: Match, options: Options) -> Entry:
    """Plan, emit, load, verify and substitute one attention. What goes wrong leaves eager in place."""
    region, sizes = match.region, seen_sizes(match)
    base = Entry(0, "fallback", region.origin, region.source, region, sizes, (*sorted(match.learned),))
    if why := refused(match, sizes, options):
        return replace(base, status="declined", reason=why)
    if options.empty_rows == "zero" and region.empty_row == "nan":
        match = replace(match, region=replace(region, empty_row="zero"))
    try:
        if handed(match, sizes, options) and (taken := handed_over(match, sizes, options, base)):
            return taken
        if why := faster_apart(match, sizes, options):
            return replace(base, status="declined", reason=why, advice=FUSE)
        match, lowered = trainable(module, match, sizes, options)
        base = replace(base, region=match.region)
        if slow_to_train(match, sizes, lowered, options):
            return replace(base, status="declined", reason=f"{TRAINING}: {lowered.why_no_backward}", advice=ADVICE)
        base = described(base, lowered)
        lowered, verdict = judged(match, lowered, sizes, options)
        base = described(base, lowered)
    except Exception as error:  # a compiler error of any kind must not cost the user's result
        log.debug("fusecomp failed at %s", region.origin, exc_info=True)
        return fallen_back(base, f"{type(error).__name__}: {error}", options)
    base = replace(base, verdict=str(verdict) if verdict else "not verified: the option verify is off")
    if verdict is not None and not verdict.passed:
        return fallen_back(base, f"the kernel {verdict}", options)
    register(lowered.key, Kernel(match.region, lowered.launch, lowered.backward))
    substitute(module, match, lowered.key, operation_for(match, lowered), lowered.source)
    return replace(base, status="fused")


def trainable(
    module: GraphModule, match: Match, sizes: Mapping[str, int], options: Options
) -> tuple[Match, Lowered]:
    """What runs it: of operands whose gradients have a kernel, if the products can be given such."""
    lowered = lower(match, sizes, match.device, options)
    if not lowered.why_no_backward:
        return match, lowered
    own = own_operands(match)
    again = found_apart(module, match, own)
    plain = lower(again, sizes, match.device, options) if again is not None else lowered
    if again is not None and not plain.why_no_backward:
        return again, plain
    withdraw(own)
    return match, lowered


def judged(
    match: Match, lowered: Lowered, sizes: Mapping[str, int], options: Options
) -> tuple[Lowered, Verdict | None]:
    """What runs it, with its verdict: the portable kernel where one for a single kind of device fails."""
    if lowered.portable:
        return lowered, checked(match, lowered, sizes, options)
    try:
        verdict = checked(match, lowered, sizes, options)
        if verdict is None or verdict.passed:
            return lowered, verdict
        why = f"the kernel for this device {verdict}"
    except Exception as error:  # noqa: BLE001 - of any kind: the portable kernel is there
        why = f"{type(error).__name__}: {error}"
    log.warning("fusecomp: attention at %s runs the portable kernel, which is slower: %s", match.region.origin, why)
    lowered = lower(match, sizes, match.device, options, portable=True)
    return lowered, checked(match, lowered, sizes, options)


def handed(match: Match, sizes: Mapping[str, int], options: Options) -> bool:
    """Whether PyTorch's own kernel runs it: plain attention, but where a generated one is faster still."""
    if options.lowering != "auto" or options.batch_invariant or not library.takes(match, sizes):
        return False
    return not hopper.takes(match, sizes, options) or not hopper.trains_faster(match, options)


def operation_for(match: Match, lowered: Lowered) -> str:
    """The operator that runs it. Only under no_grad, on which Dynamo guards, is one without a gradient safe."""
    if match.region.lse:
        return "attention_and_lse"
    if not records(match.output):
        return "attention"
    return "attention_recomputed" if lowered.backward is None else "attention_and_lse"


def refused(match: Match, sizes: Mapping[str, int], options: Options) -> str:
    """Why no kernel is made, whatever it would cost; empty where one is."""
    if options.lowering == "off":
        return "the option lowering is off"
    if 0 in sizes.values():  # for good: Dynamo fixes such lengths
        return f"there is nothing to compute: {next(name for name, n in sizes.items() if not n)} is 0"
    if (what := foreign(match)) is not None:
        return f"there is no kernel for {what}"
    if any(getattr(torch, match.region.operand(name).dtype).itemsize == 1 for name in match.learned):
        return "it is trained through operands of 8 bits, whose gradients PyTorch rounds to as many"
    return ""


def foreign(match: Match) -> str | None:
    """Tensors that no kernel can read."""
    kinds = (type(n.meta["val"]) for n in match.inputs if is_traceable_wrapper_subclass(n.meta["val"]))
    others = [f"tensors of the class {kind.__name__}" for kind in kinds]
    device = match.device.type
    return f"tensors on {device}" if device not in DEVICES else next(iter(others), None)


def handed_over(match: Match, sizes: Mapping[str, int], options: Options, base: Entry) -> Entry | None:
    """The entry of plain attention that PyTorch's own fused kernel runs; None where it does not agree with eager."""
    lowered = Lowered("library", library.launch(match.region), "library")
    try:
        verdict = checked(match, lowered, sizes, options)
    except (RuntimeError, FusecompError) as error:
        log.debug("scaled_dot_product_attention does not run %s: %s", match.region.origin, error)
        return None
    if verdict is not None and not verdict.passed:
        return None
    library.substitute(match)
    kernel = "aten.scaled_dot_product_attention"
    return replace(base, status="fused", kernel=kernel, lowering="library", verdict=str(verdict or "not verified"))


TRAINING = "it is trained, and recomputing its gradient block by block is slower than eager's"
ADVICE = "for inference, call the model under torch.no_grad(); lowering='triton' fuses all the same"
EAGER_SHARE = 0.25
"""Where eager would keep more than this share of the GPU's memory for one attention, recomputing is worth its time."""


def slow_to_train(match: Match, sizes: Mapping[str, int], lowered: Lowered, options: Options) -> bool:
    """Whether training is better off with eager's gradient: on a GPU, without a backward kernel, if eager has room."""
    device = match.device
    trains = bool(match.learned) and lowered.backward is None
    if not trains or device.type != "cuda" or options.lowering != "auto":
        return False
    batch = math.prod(sizes[v.name.upper()] for v in match.region.batch)
    kept = batch * sizes["M"] * sizes["N"] * 6  # float32 scores and half probabilities
    return kept <= EAGER_SHARE * torch.cuda.get_device_properties(device).total_memory


FUSE = "lowering='triton' fuses all the same"


def faster_apart(match: Match, sizes: Mapping[str, int], options: Options) -> str:
    """Why the rest of the graph runs it faster than a generated kernel; empty where it does not."""
    if match.device.type != "cuda" or options.lowering != "auto" or options.batch_invariant:
        return ""
    return unfused.faster_apart(match.region, sizes, planned(match, sizes), current())


INTERPRET = (
    "on CPU tensors Triton's kernels run in its interpreter alone; set TRITON_INTERPRET=1, or lowering='auto'"
)


def checked(match: Match, lowered: Lowered, sizes: Mapping[str, int], options: Options) -> Verdict | None:
    """The verdict on a kernel, unless verification is off."""
    if not options.verify:
        return None
    if lowered.lowering == "triton" and match.device.type == "cpu" and not triton_interprets():
        raise KernelError(INTERPRET)
    with torch.no_grad(), torch._dispatch.python.suspend_functionalization(), real_tensors():
        return verify(match, lowered.launch, sizes, match.device, lowered.text, lowered.backward)


def seen_sizes(match: Match) -> dict[str, int]:
    """The lengths of this graph, symbolic ones at the size they were seen with."""
    return {name: seen(source) for name, source in match.sizes.items()}


def described(entry: Entry, lowered: Lowered) -> Entry:
    """The entry with what is known once a kernel exists."""
    source = lowered.source
    return replace(
        entry,
        plan=lowered.plan,
        kernel=source.name if source else lowered.key,
        kernel_text=source.text if source else "",
        kernel_source=source,
        lowering=lowered.lowering,
    )


def fallen_back(entry: Entry, reason: str, options: Options) -> Entry:
    """Eager stays: one warning, or an error under strict."""
    message = f"attention at {entry.where or 'an unknown line'} runs as written: {reason}"
    if options.strict:
        raise VerificationError(message)
    log.warning("fusecomp: %s", message)
    return replace(entry, status="fallback", reason=reason, lowering="eager")


def declined(found: Declined, options: Options) -> Entry:
    entry = Entry(0, "declined", found.place.where, found.place.source, reason=found.reason, advice=found.advice)
    return entry if found.error is None else fallen_back(entry, found.reason, options)


def unwritten(name: str, error: Exception, options: Options) -> Entry:
    """One rewriting failed: what it would have written out is read as the program has it."""
    return fallen_back(Entry(0, "fallback"), f"`{name}` stopped with {type(error).__name__}: {error}", options)


def plain_sdpa(module: GraphModule) -> Iterator[Entry]:
    """SDPA calls that PyTorch's own kernels run."""
    for node, why in plain_calls(module):
        at = place(node)
        yield Entry(0, "declined", at.where, at.source, reason=why)


def unread(gm: GraphModule, error: Exception, status: str = "fallback") -> Compilation:
    """What to tell where a graph could not be read at all: its softmaxes run as written."""
    softmaxes = [n for n in gm.graph.nodes if "softmax" in word(n) or "scaled_dot" in word(n)]
    reason = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
    places = [place(n) for n in softmaxes] or [Place()]
    return Compilation(gm, tuple(Entry(i, status, p.where, p.source, reason=reason) for i, p in enumerate(places)))
