"""Say what a job's working directory weighs and what makes it too large for Ray.

    python jobs/preflight.py && ray job submit --working-dir . -- python jobs/...

Exits with 1 if `ray job submit --working-dir DIR` would be refused.
"""

import argparse
import sys
from pathlib import Path

from hvd_ray.cli import refuse
from hvd_ray.errors import UserError
from hvd_ray.pipelines.upload import plan_upload, upload_lines


def main() -> int:
    parser = argparse.ArgumentParser(description="What `ray job submit --working-dir` uploads.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    try:
        upload = plan_upload(parser.parse_args().folder)
    except UserError as error:
        refuse(str(error))
    print("\n".join(upload_lines(upload)))
    return 1 if upload.is_too_large else 0


if __name__ == "__main__":
    sys.exit(main())
