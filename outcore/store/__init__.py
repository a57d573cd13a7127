"""Where bytes live: host arenas, device spans, scratch on disk, and the ledgers of each tier."""
