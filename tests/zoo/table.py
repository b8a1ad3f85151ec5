"""Results as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.survey import MODES, Result


def summary(rows: Sequence[Result]) -> dict[str, Any]:
    """For each mode: models, cores, how many of them were fused, results out of budget."""
    found = {}
    for mode in modes(rows):
        of = [r for r in rows if r.mode == mode]
        cores, fused = sum(r.cores for r in of), sum(r.fused for r in of)
        found[mode] = {
            "models": len(of),
            "cores": cores,
            "fused": fused,
            "percent": round(100 * fused / max(cores, 1), 1),
            "wrong": sum(not r.right for r in of),
        }
    return found


def markdown(rows: Sequence[Result]) -> str:
    """Cores fused by mode, by model, and why the others were left."""
    lines = ["| mode | models | cores | fused | | out of budget or failed |", "|---|---|---|---|---|---|"]
    for mode, s in summary(rows).items():
        lines.append(f"| {mode} | {s['models']} | {s['cores']} | {s['fused']} | {s['percent']} % | {s['wrong']} |")
    shown = modes(rows)
    lines += ["", f"| model | {' | '.join(shown)} |", "|---" * (len(shown) + 1) + "|"]
    for model in dict.fromkeys(r.model for r in rows):
        lines.append(f"| {model} | {' | '.join(cell(rows, model, mode) for mode in shown)} |")
    lines += ["", *left(rows)]
    return "\n".join(lines) + "\n"


def modes(rows: Sequence[Result]) -> list[str]:
    return [m for m in MODES if any(r.mode == m for r in rows)]


def cell(rows: Sequence[Result], model: str, mode: str) -> str:
    """ "2 of 2", and what went wrong."""
    r = next((r for r in rows if (r.model, r.mode) == (model, mode)), None)
    if r is None:
        return ""
    if r.problem:
        return r.problem.replace("|", "/").replace("\n", " ")[:80]
    return f"{r.fused} of {r.cores}" + ("" if r.right else f", WRONG by {max(r.error or 0, r.gradient_error or 0):.1e}")


def left(rows: Sequence[Result]) -> list[str]:
    """What the report says of the candidates left, with the models and modes it says it of."""
    said: dict[str, dict[str, list[str]]] = {}
    for r in rows:
        for x in r.left:
            sentence = f"{x['where']}: {x['reason']}" + (f"; {x['advice']}" if x["advice"] else "")
            said.setdefault(sentence, {}).setdefault(r.model, []).append(r.mode)
    return [f"- {in_models(of)}: {sentence}" for sentence, of in said.items()]


def in_models(of: dict[str, list[str]]) -> str:
    return ", ".join(f"{model} ({', '.join(by)})" for model, by in of.items())
