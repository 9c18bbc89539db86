"""Who may reach the server: what its addresses need, and whether the files of TLS can be used."""

from typing import TYPE_CHECKING

from protocol.addresses import is_loopback
from protocol.errors import ConfigurationError
from ps.settings.combinations import option_name

if TYPE_CHECKING:
    from ps.settings.config import ServerConfig


def check_access(config: "ServerConfig") -> None:
    """Check that nobody is let in, and nothing is shown, but to whom it was meant.

    Raises:
        ConfigurationError: naming the options; or a file of TLS cannot be used.
    """
    if config.insecure and config.token_file is not None:
        raise ConfigurationError("--insecure and --token-file exclude each other: give one of them")
    _check_host(config, "host", "lets other machines connect", "admit anyone")
    if config.status_port is not None:
        _check_host(config, "status_host", "shows the status page to other machines", "show it to anyone")
        if config.status_port and (config.status_host, config.status_port) == (config.host, config.port):
            raise ConfigurationError(
                f"--port and --status-port are both {config.port}: the page needs a port of its own"
            )
    _ = config.tls  # its files are read here, where they can still be mended


def _check_host(config: "ServerConfig", name: str, consequence: str, instead: str) -> None:
    host = getattr(config, name)
    if not (is_loopback(host) or config.insecure or config.token_file is not None):
        raise ConfigurationError(
            f"{option_name(name)} {host} {consequence}, so it needs --token-file "
            f"(make one with the server's sub-command `token`), or --insecure to {instead}"
        )
