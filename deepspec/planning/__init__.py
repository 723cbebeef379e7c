"""Plans and checks that need no torch: what a run would take, and what is missing before it starts."""
