"""accelerate's launcher for the ranks of one replica, ended with the code of the rank that failed first: what was wrong it has said."""

import signal
import sys

from accelerate.commands import launch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_ASKED = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    """Run `accelerate launch` with this process's words; the exit code as a shell tells it."""
    try:
        launch.main()
    except ChildFailedError as error:
        code = int(error.get_first_failure()[1].exitcode)
        return code if code > 0 else 1 if -code in _ASKED else 128 - code  # nobody asked that rank alone to stop
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
