"""The chips whose NPU a bundle can be compiled for, and what was measured on some of them."""
