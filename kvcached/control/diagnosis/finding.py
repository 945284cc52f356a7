"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
NOTE = "note"
PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report: ``level`` is ok, note or problem; ``remedy`` is what to do, or empty."""

    level: str
    subject: str
    text: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return the JSON form."""
        return {"level": self.level, "subject": self.subject, "text": self.text, "remedy": self.remedy}
