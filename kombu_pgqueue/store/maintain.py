# SPDX-License-Identifier: BSD-3-Clause
"""Runtime leases, signs of life, and the work of whoever leads the maintenance."""

from __future__ import annotations

from uuid import UUID

from kombu_pgqueue.store.base import StoreBase, seconds


class MaintenanceVerbs(StoreBase):
    """Leases of holders and leaders; reaper, sweeper, retention."""

    def runtime_lease_acquire(
        self, lease_name: str, lease_holder: str, lease_token: UUID, ttl: float
    ) -> bool:
        """Become the holder; False while another one's lease stands."""
        return bool(
            self._row(
                "runtime_lease_acquire",
                {
                    "lease_name": lease_name,
                    "lease_holder": lease_holder,
                    "lease_token": lease_token,
                    "ttl": seconds(ttl),
                },
            )[0]
        )

    def runtime_lease_renew(self, lease_name: str, lease_token: UUID, ttl: float) -> bool:
        """Stay the holder; False if the lease is somebody else's or gone."""
        args = {"lease_name": lease_name, "lease_token": lease_token, "ttl": seconds(ttl)}
        return bool(self._row("runtime_lease_renew", args)[0])

    def runtime_lease_release(self, lease_name: str, lease_token: UUID) -> bool:
        """Stop being the holder."""
        args = {"lease_name": lease_name, "lease_token": lease_token}
        return bool(self._row("runtime_lease_release", args)[0])

    def holder_lock(self, lease_name: str) -> int:
        """The number to write into `lease_holder` as `lock=<n>` if the holder announces itself."""
        return int(self._row("holder_lock", {"lease_name": lease_name})[0])

    def announce_holder(self, lease_name: str) -> bool:
        """Show a sign of life for as long as the connection lives."""
        return bool(self._row("holder_announce", {"lease_name": lease_name})[0])

    def reap(self, *, limit: int = 500, actor: str = "reaper") -> int:
        """One batch of jobs whose lease no longer stands; call until it answers 0."""
        return self._maintain("reap", limit, actor)

    def sweep_expired(self, *, limit: int = 500, actor: str = "sweeper") -> int:
        """One batch of jobs that expired before they started."""
        return self._maintain("sweep_expired", limit, actor)

    def prune(self, *, limit: int = 1000, actor: str = "retention") -> int:
        """One batch of what retention no longer keeps."""
        return self._maintain("prune", limit, actor)

    def _maintain(self, name: str, limit: int, actor: str) -> int:
        return int(self._row(name, {"limit": limit, "actor": actor})[0])
