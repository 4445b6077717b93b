#!/usr/bin/python3
"""rollyard-healthcheck [PATH]: exits with 0 if the service in this container answers PATH with 200, else with 1.

PATH is /healthz (the process responds) or /readyz (it accepts work). Imports nothing but the standard library.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request


def main() -> int:
    path = sys.argv[1] if len(sys.argv) > 1 else "/healthz"
    address = f"127.0.0.1:{os.environ.get('ROLLYARD_PORT', '8127')}{path}"
    own = ssl.create_default_context()  # the certificate names other hosts than 127.0.0.1
    own.check_hostname, own.verify_mode = False, ssl.CERT_NONE
    for url, context in ((f"http://{address}", None), (f"https://{address}", own)):
        try:
            with urllib.request.urlopen(url, timeout=4, context=context):
                return 0
        except urllib.error.HTTPError as error:
            sys.stderr.write(f"{path}: {error.code} {error.read(2000).decode(errors='replace')}\n")
            return 1
        except OSError as error:
            reason = error
    sys.stderr.write(f"{path}: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
