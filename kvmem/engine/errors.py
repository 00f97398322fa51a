"""Typed refusals and failures of the engine. Each names the value and the rule it broke."""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything that the engine raises on purpose."""


class RequestError(EngineError, ValueError):
    """A malformed request: refused at the boundary, nothing was queued."""


class PromptTooLong(RequestError):
    """The prompt and its answer cannot fit the context window, a page-table row or a pool."""


class QueueFull(EngineError):
    """The bounded queue is full. Try again later; the queue does not grow."""


class FingerprintMismatch(EngineError):
    """Two pools that must agree differ. ``fields`` names what differs."""

    def __init__(self, where: str, fields: dict[str, tuple[object, object]]):
        self.fields = fields
        listed = "; ".join(
            f"{name}: {ours!r} here, {theirs!r} there" for name, (ours, theirs) in fields.items()
        )
        super().__init__(f"{where}: fingerprints differ in {listed}")


class TransferFailed(EngineError):
    """The move of a prefilled request into the decode pool did not complete."""


class StepInterrupted(EngineError):
    """An earlier step was left by an exception after it was planned: what is planned may not have run.

    Results so far stand; the engine serves no further step.
    """
