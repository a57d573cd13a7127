"""Where bytes live: host arenas, device spans and the ledgers that keep them within budget."""
