"""The order handed out over a network, to processes that share no launcher: sessions, leases, a ledger."""
