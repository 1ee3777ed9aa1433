"""What SGLang's plugin entry point calls, in every process of a server. Costs nothing unless ADAFLASH is asked for."""

from adasim.real.sglang_plugin import cpu


def register() -> None:
    """Register the algorithm ADAFLASH, and the CPU's hooks where the environment asks for them.

    SGLang logs a plugin's error and goes on. So nothing that can fail is done here: versions, arguments and settings are
    checked when the algorithm is chosen, where an error ends the start. An SGLang too different even for this leaves
    ADAFLASH unknown, which ends the start as well.
    """
    if cpu.asked_for():
        cpu.install()
    from adasim.real.sglang_plugin.algorithm import register as register_algorithm

    register_algorithm()
