"""One file a published finding: which jobs it needs, and how what they measured becomes one verdict. Imports no torch."""
