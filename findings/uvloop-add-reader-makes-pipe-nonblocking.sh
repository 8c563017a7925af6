#!/usr/bin/env bash
# uvloop 0.23.0: `loop.add_reader(fd, callback)` makes the descriptor non-blocking, and it stays so after
# `remove_reader`. asyncio's own loop leaves the descriptor as it is. So a `multiprocessing` connection that is read in
# the callback works with asyncio, and with uvloop fails as soon as only a part of a message has arrived.
# Expected: the same on both loops, since uvloop replaces asyncio's loop without changes to a program.
# Seen: asyncio: blocking before, during and after, and the message arrives. uvloop: blocking before, not during, not
# after, and `recv` raises BlockingIOError in the middle of a message.
# Remedy: receive on a thread, and hand the message to the loop with `call_soon_threadsafe`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uvloop==0.23.0
cat > "$folder/reader.py" <<'PY'
import asyncio, os, pickle, struct, sys, threading, time
from multiprocessing import Pipe


async def read_in_a_callback():
    """Send a message in two parts, receive it in a reader's callback, and return what was seen."""
    receiver, sender = Pipe(duplex=False)
    loop, found, blocking = asyncio.get_running_loop(), asyncio.get_running_loop().create_future(), []

    def receive():
        try:
            found.set_result(len(receiver.recv()))
        except BaseException as error:
            found.set_result(type(error).__name__)
        loop.remove_reader(receiver.fileno())

    def send_in_parts():
        data = pickle.dumps("x" * 1000)
        data = struct.pack("!i", len(data)) + data  # a message as `multiprocessing` frames it
        os.write(sender.fileno(), data[:500])
        time.sleep(0.5)
        os.write(sender.fileno(), data[500:])

    blocking.append(os.get_blocking(receiver.fileno()))
    loop.add_reader(receiver.fileno(), receive)
    blocking.append(os.get_blocking(receiver.fileno()))
    threading.Thread(target=send_in_parts).start()
    received = await found
    blocking.append(os.get_blocking(receiver.fileno()))
    await asyncio.sleep(1)
    return blocking, received


if sys.argv[1] == "uvloop":
    import uvloop

    print("uvloop", uvloop.run(read_in_a_callback()))
else:
    print("asyncio", asyncio.run(read_in_a_callback()))
PY
seen=$(for loop in asyncio uvloop; do "$folder/venv/bin/python" "$folder/reader.py" $loop; done)
echo "$seen"
want="asyncio ([True, True, True], 1000)
uvloop ([True, False, False], 'BlockingIOError')"
[ "$seen" = "$want" ] || { echo "this has changed" >&2; exit 1; }
