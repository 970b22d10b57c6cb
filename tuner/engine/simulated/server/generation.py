"""One answer on its way: how long it will be, what of it is out, and why it ends."""

from __future__ import annotations

from tuner.engine.simulated.server.completion_request import CompletionRequest
from tuner.engine.simulated.server.replies import Reply
from tuner.engine.simulated.server.served import Served
from tuner.engine.simulated.server.toy_tokenizer import AnswerText


class Generation:
    """One answer.

    Attributes:
        tokens: how many it will have, if the context does not end it.
        out: of them, handed out; the first at `first_s`, the last at `last_s`.
    """

    def __init__(self, served: Served, asked: CompletionRequest, number: int) -> None:
        self.asked = asked
        self.number = number
        self.text = AnswerText(asked.prompt, served.vocabulary)
        self.reply = Reply(f"{number:016x}", served.command.served_names[0], asked.chat)
        room = served.plan.max_model_len - len(asked.prompt)
        self.tokens = most = room if asked.max_tokens is None else asked.max_tokens
        if not asked.ignore_eos:
            self.tokens = min(most, max(asked.min_tokens, self.text.natural_tokens))
        self._stops = self.tokens < most
        self.out = 0
        self.first_s = self.last_s = 0.0
        self._before, self._after = self.reply.piece()

    @property
    def reason(self) -> str:
        """Why it ended."""
        return "stop" if self._stops and self.out == self.tokens else "length"

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None of fewer than two."""
        return (self.last_s - self.first_s) / (self.out - 1) if self.out > 1 else None

    def piece(self, count: int, *, last: bool) -> bytes:
        """The event of the `count` tokens that came last."""
        after = self._after
        if last:
            after = after.replace(
                b'"finish_reason":null', b'"finish_reason":"%s"' % self.reason.encode()
            )
        text = self.text.words(self.out - count, self.out).encode()
        return b"".join((self._before, text, after))
