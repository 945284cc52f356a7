"""``python -m kvcached.control COMMAND``, the same as the console script ``kvcached-control``.

Nothing is loaded here before the signals are seen to: Ctrl-C in the first milliseconds must not show a traceback.
"""

from __future__ import annotations

import signal
import sys

from kvcached.control import exit_codes


def main() -> int:
    """Run the command line of this process; the exit code."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as under nohup
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvcached.control.commands import command_line  # noqa: PLC0415 - see above

    try:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command_line.main()
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
