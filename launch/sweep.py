"""A sweep: the main job for every combination of the values given, each under a launcher of its own.

    python launch/sweep.py -m +experiment=tiny drafter.block_size=4,8,16
    python launch/sweep.py -m +experiment=tiny +sweep=depth

The same command continues a sweep that was cut: complete jobs are skipped, the others go on from their checkpoints.
Exit codes: 0 all jobs complete, 1 one failed or was stopped, 2 wrong command line or configuration.
"""

from deepspec.cli.sweep import main

if __name__ == "__main__":
    main()
