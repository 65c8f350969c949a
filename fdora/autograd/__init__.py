"""One autograd.Function pair per op: what is saved and where gradients go. The arithmetic is in the backends."""
