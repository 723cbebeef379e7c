"""Looking after feature stores: summary, check, repair, and import of the caches of other projects."""
