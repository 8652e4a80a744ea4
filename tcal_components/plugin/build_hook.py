"""Build hook of the wheel: what an editable install gets.

hatchling would copy the force-included recipes and configs into an editable install too, where they would go stale; there
the hook in :mod:`tcal_components.plugin.tune_hook` reads them from the repository, and only the ``.pth`` file is needed.
"""

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EditableBuildHook(BuildHookInterface):
    """Limits the forced files of an editable wheel to the start-up hook."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Set ``force_include_editable``.

        Args:
            version: ``"standard"`` or ``"editable"``.
            build_data: hatchling's build data, changed in place.
        """
        build_data["force_include_editable"]["tcal_components/plugin/tcal_tune_hook.pth"] = "tcal_tune_hook.pth"
