"""GEMMs of groups; the contract is `kernels/grouped`."""
