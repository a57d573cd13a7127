"""Plans and runs for people: tables, words, pages that need no network, timelines, traces."""
