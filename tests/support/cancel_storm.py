"""A gRPC client that makes calls and cancels them at once: python cancel_storm.py URL METHOD SECONDS.

The message of its calls comes from stdin. It prints a line when its first call was answered, and at the end
how many it has made.
"""

import sys
import time

import grpc

AT_ONCE = 500


def main(url, method, seconds):
    message = sys.stdin.buffer.read()
    with grpc.insecure_channel(url) as channel:
        call = channel.unary_unary(method)
        call(message, timeout=60)
        print("storm begins", flush=True)
        made, end = 0, time.monotonic() + float(seconds)
        while time.monotonic() < end:
            for each in [call.future(message) for _ in range(AT_ONCE)]:
                each.cancel()
            made += AT_ONCE
        print(made)


if __name__ == "__main__":
    main(*sys.argv[1:])
