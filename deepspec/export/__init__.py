"""What an engine loads: weights, config.json, model card and serving bundle, proved by reading them back."""
