"""What all operations share: host state, dispatch, operators, the ledger, replays, devices and transfers."""
