"""The gain of the best over the reference, in one honest sentence."""

from __future__ import annotations

from tuner.records import StudyRecord
from tuner.types import Measurement

NOISE = "one measurement each: small differences, and on a busy machine large ones, are noise"


def gain_sentence(study: StudyRecord) -> str:
    """What the best scored against the reference, and what that is made of.

    The score prices preemptions and lost requests; throughput and latency are told beside it,
    because a higher score can be bought with either.
    """
    best, reference = study.best, study.reference
    if best is None:
        return "No configuration worked."
    if best.is_reference:
        return "The reference is the best: nothing that was tried scored higher."
    if reference is None:
        return "The reference was not measured, so that no gain can be told."
    if study.gain is None or best.measurement is None or reference.measurement is None:
        return "The reference failed, so that no gain can be told."
    parts = _parts(best.measurement, reference.measurement)
    return f"Score {study.gain:+.1%} over the reference: {parts} ({NOISE})."


def _parts(best: Measurement, reference: Measurement) -> str:
    before, after = (m.output_throughput_tokens_per_s for m in (reference, best))
    parts = [f"output tokens/s {after / before - 1:+.1%}"] if before else []
    parts.append(f"preemptions {reference.counters.preemptions} -> {best.counters.preemptions}")
    for name, old, new in (
        ("TTFT", reference.ttft_s, best.ttft_s),
        ("TPOT", reference.tpot_s, best.tpot_s),
    ):
        if old is not None and new is not None:
            parts.append(f"{name} p99 {old.p99 * 1000:.0f} -> {new.p99 * 1000:.0f} ms")
    return ", ".join(parts)
