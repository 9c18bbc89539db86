"""Which rounds are validated: drawn from a secret of the server, so that no worker can know them beforehand."""

import hmac
from dataclasses import dataclass

SECRET_BYTES = 32

OFTEN = 2
"""Mean distance of validated rounds during an alarm: certainty could be foreseen."""

_DRAW_BYTES = 8


@dataclass(frozen=True)
class ValidatedRounds:
    """Round 0, and each other round with probability `1 / every`: a pure function of the secret and the step.

    A worker that knew the rounds could earn trust in them and spend it in the others. The draw of one round says
    nothing of another's: it is HMAC-SHA256 of the step under the secret.

    Attributes:
        every: mean distance of validated rounds, at least 1; 1 validates all.
        secret: `SECRET_BYTES` bytes that only the server knows.
    """

    every: int
    secret: bytes

    def __contains__(self, step: int) -> bool:
        """Say whether the round of a step is validated."""
        if step == 0 or self.every == 1:
            return True
        draw = hmac.digest(self.secret, step.to_bytes(8, "little"), "sha256")[:_DRAW_BYTES]
        return int.from_bytes(draw, "little") * self.every < 1 << (8 * _DRAW_BYTES)

    def more_often(self) -> "ValidatedRounds":
        """Return the rounds that are validated during an alarm: these, and others."""
        return ValidatedRounds(min(self.every, OFTEN), self.secret)


ALL_ROUNDS = ValidatedRounds(1, b"")
