"""
How many pixels may be in flight: of pictures that threads hold at full size, to resize or compare them. A PNG of 600 KB
may hold 160 megapixels, i.e. a gigabyte while it is decoded, and four to sixteen threads read at once. (cache.py
takes this file if it is there; extras/known.py needs it.)
"""
import contextlib
import threading

from PIL import Image

from common import MAX_PIXELS, InputError, open_image

# PIL takes memory in blocks. Those of up to 32 MB, such as its usual 16 MB, stay with their thread when they are freed
# (glibc's heaps), and four threads then keep 6 GB; larger ones go back to the system at once.
Image.core.set_block_size(2**26)

# 8 bytes each at the peak, i.e. 2 GB: five photographs of 48 megapixels, or one that is as large as may be. Whatever
# needs more, such as a pair of the largest, is read alone.
MOST = MAX_PIXELS * 3 // 2

turn = threading.Condition()
held = {} # {thread: the pixels that it holds}


def pixels_of(path):
    """From the picture's header. What cannot be opened holds nothing: reading it names the error."""
    with contextlib.suppress(InputError), open_image(path) as image:
        return image.width * image.height
    return 0


def in_turn(read_pictures):
    """cache.read_pictures, with room for all pictures of its sample."""
    def read(pipe, sample, *what):
        with room_for(sample.contents):
            return read_pictures(pipe, sample, *what)
    return read


@contextlib.contextmanager
def room_for(paths):
    """Waits until there is room for these pictures, all at once: if each of two threads had one picture and waited for
    room for a second one, neither would go on. So a thread that holds some already does not wait."""
    thread = threading.get_ident()
    if thread in held:
        yield
        return
    pixels = sum(map(pixels_of, paths))
    with turn:
        turn.wait_for(lambda: not held or sum(held.values()) + pixels <= MOST)
        held[thread] = pixels
    try:
        yield
    finally:
        with turn:
            del held[thread]
            turn.notify_all()
