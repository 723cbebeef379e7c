"""Why a served drafter accepts less than it should: the engine's counts against our decoder with one thing wrong."""
