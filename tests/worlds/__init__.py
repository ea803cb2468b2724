"""What many tests share: what bodies note, and the programs that sell, book and pay."""
