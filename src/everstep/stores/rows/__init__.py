"""What a store keeps, row by row, and the pure rules about it. Every store follows the same ones."""
