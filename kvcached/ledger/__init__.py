"""Ledgers: who publishes a limit, who subscribes to it, and who only looks.

``binding`` alone knows the native library; ``directory`` opens files through it; everything else goes through those.
"""

from kvcached.ledger.binding import ACKNOWLEDGED, PUBLISHED, NativeLibraryError
from kvcached.ledger.contents import AuditRecord

__all__ = ["ACKNOWLEDGED", "PUBLISHED", "AuditRecord", "NativeLibraryError"]
