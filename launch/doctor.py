"""Find out why a served drafter accepts less than it does offline. Exit code 0: healthy, 4: a fault was found.

    python launch/doctor.py run.dir=runs/tiny endpoint=http://127.0.0.1:8000 drafter=runs/tiny/export
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("doctor")
