"""Ways of decoding, by name."""

# plain target; all K draft tokens verified; lengths chosen by Algorithm 1; by the asynchronous form of Sec. 5.2
MODES = ("none", "fixed", "scheduled", "asynchronous")
SCHEDULED = ("scheduled", "asynchronous")
