"""Serving engines that hand out hidden states, one file each."""
