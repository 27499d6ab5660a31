"""Certificates for tests, by the openssl command."""

import subprocess
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class CertificateAuthority:
    """Signs certificates for a test, by the openssl command."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca_file = str(folder / "ca.crt")
        self._run("req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.crt", "-subj=/CN=CA")

    def issue(self, name: str, subject_alt_name: str) -> tuple[str, str]:
        """Return the files of a new certificate, valid as a server's and a client's, and its key.
        With the same name again they are overwritten.
        """
        (self._folder / "extensions").write_text(
            f"subjectAltName={subject_alt_name}\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        cert, key, request = f"{name}.crt", f"{name}.key", f"{name}.csr"
        self._run("req", *_NEW_KEY, "-keyout", key, "-out", request, f"-subj=/CN={name}")
        signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
        self._run("x509", "-req", "-in", request, *signing, "-extfile", "extensions", "-out", cert)
        return str(self._folder / cert), str(self._folder / key)

    def encrypted(self, key: Path) -> str:
        """Return a key (PEM) as it is with a passphrase."""
        return self._run("ec", "-in", str(key), "-aes256", "-passout", "pass:secret")

    def _run(self, *args: str) -> str:
        command = ["openssl", *args]
        done = subprocess.run(
            command, cwd=self._folder, check=True, capture_output=True, text=True, timeout=120
        )
        return done.stdout
