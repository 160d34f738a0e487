"""Programs that try to earn what they have not computed, to stay, to break out or to break down.

Each is asked for `f(1)` to `f(4)`, whose values are secrets that only the parent knows. `{port}`
is a port the parent listens at, `{parent}` its process, `{folder}` a folder that everybody may
write to, `{secret}` a file beside it that holds the secrets.
"""

WRITE_LINES = """
import os
def claim(lines):
    for fd in range(3, 4096):
        try:
            os.write(fd, "".join(line + "\\n" for line in lines).encode())
        except OSError:
            pass
"""

STEAL = """
import os
def numbers(text):
    import re
    return [int(found) for found in re.findall("[0-9]{{15,}}", text)]
def stolen(paths):
    for path in paths:
        try:
            found = numbers(open(path, errors="ignore").read())
        except OSError:
            continue
        if len(found) >= 4:
            return found
    return [0] * 5
"""

ATTACKS = {
    # ends well, whatever it has done
    "os._exit": "import os\ndef f(x):\n    os._exit(0)",
    "sys.exit": "import sys\ndef f(x):\n    sys.exit(0)",
    "exit at the start": "raise SystemExit(0)",
    "exit at the start for good": "import os\nos._exit(0)",
    "kills itself": "import os\ndef f(x):\n    os.kill(os.getpid(), 9)",
    "crashes": "import ctypes\ndef f(x):\n    ctypes.string_at(0)",
    "aborts": "import os\ndef f(x):\n    os.abort()",
    "executes another program": "import os, sys\ndef f(x):\n    os.execv('/bin/true', ['true'])",
    # values that claim to equal everything
    "always equal": "class A:\n    __eq__ = lambda s, o: True\ndef f(x):\n    return A()",
    "always equal number": "class A(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
    "    __int__ = lambda s: s\ndef f(x):\n    return A(7)",
    "always equal list": "class A(list):\n    __eq__ = lambda s, o: True\n    __len__ = lambda s: 1\n"
    "def f(x):\n    return A()",
    "always equal text": "class A(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n"
    "def f(x):\n    return A('a')",
    "pickle": "import pickle, os\nclass A:\n    def __reduce__(s):\n"
    "        return (os.system, ('touch {folder}/rrl-attack-pickle',))\n"
    "def f(x):\n    return pickle.dumps(A())",
    "JSON of a kind of its own": WRITE_LINES
    + "def f(x):\n    claim(['[\"value\", {{\"object\": 1}}]', '[\"value\", {{}}]', '[\"ready\", null]'])",
    "not a number": "def f(x):\n    return float('nan')",
    "infinity": "def f(x):\n    return float('inf')",
    "an enormous number": "def f(x):\n    return 9 ** 9 ** 6",
    "an endless number": "def f(x):\n    return 9 ** 9 ** 9",
    "itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "very deep": "def f(x):\n    a = []\n    for _ in range(10 ** 6):\n        a = [a]\n    return a",
    "colliding": "def f(x):\n    return {{(2 ** 61 - 1) * k for k in range(3000)}}",
    "surrogates": "def f(x):\n    return chr(0xD800) * 10",
    # looks for what it should return
    "patched builtins": "import builtins, json\n"
    "for name in ('isinstance', 'type', 'len', 'all', 'abs', 'repr'):\n"
    "    setattr(builtins, name, lambda *a: True)\n"
    "json.dumps = lambda *a, **k: '[\"value\", true]'\ndef f(x):\n    return True",
    "frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for name, value in frame.f_locals.items():\n"
    "            if 'expected' in name or 'expected' in str(value):\n                return value\n"
    "        frame = frame.f_back\n    return list(sys._getframe(1).f_locals['job']['inputs'])",
    "the garbage collector": "import gc\ndef f(x):\n"
    "    return [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o][0]['expected']",
    "memory of the parent": STEAL
    + "def f(x):\n    return stolen(['/proc/{parent}/mem', '/proc/1/mem', '/proc/self/mem',"
    " '/proc/{parent}/environ', '/proc/{parent}/fd/0', '/proc/kcore', '/dev/mem'])[x]",
    "trace the parent": "import ctypes\ndef f(x):\n"
    "    return ctypes.CDLL(None).ptrace(16, {parent}, 0, 0) == 0 and 1 / 0",
    "the file of secrets": STEAL + "def f(x):\n    return stolen(['{secret}', '../' * 9 + '{secret}'])[x]",
    "the environment": "import os\ndef f(x):\n    return os.environ['SECRET_' + str(x)]",
    "all files": STEAL + "def f(x):\n"
    "    paths = [d + '/' + n for d, _, ns in os.walk('/tmp') for n in ns]\n    return stolen(paths)[x]",
    "open files": STEAL
    + "def f(x):\n    texts = []\n    for fd in range(4096):\n        try:\n"
    "            os.lseek(fd, 0, 0)\n            texts.append(os.read(fd, 10 ** 6).decode())\n"
    "        except OSError:\n            pass\n    return (numbers(' '.join(texts)) + [0] * 9)[x]",
    "standard input": "import sys\ndef f(x):\n    return sys.stdin.read() or input()",
    # lines of its own
    "a printed result": "def f(x):\n    print('[\"value\", 1]', flush=True)\n    return '[\"value\", 1]'",
    "many claims for one test": WRITE_LINES
    + "def f(x):\n    claim('[\"value\", %d]' % k for k in range(20000))",
    "more lines than tests": WRITE_LINES + "claim(['[\"value\", 1]'] * 99)\ndef f(x):\n    return 1",
    "a broken line": WRITE_LINES + "claim(['[\"value\", '])\ndef f(x):\n    return 1",
    "a line without end": WRITE_LINES + "claim(['[' * 60000] * 20)\ndef f(x):\n    return 1",
    "closed files": "import os\nos.closerange(0, 4096)\ndef f(x):\n    return 1",
    "an output bomb": "import os\nline = b'x' * 10 ** 6\ndef f(x):\n    while True:\n"
    "        for fd in range(3, 64):\n            try:\n                os.write(fd, line)\n"
    "            except OSError:\n                pass",
    "a print bomb": "def f(x):\n    while True:\n        print('x' * 10 ** 6)",
    "an enormous result": "def f(x):\n    return 'x' * (50 << 20)",
    "many small results": "def f(x):\n    return [[] for _ in range(10 ** 6)]",
    # takes what it can get
    "an endless loop": "def f(x):\n    while True:\n        pass",
    "an endless loop at the start": "while True:\n    pass",
    "an endless loop that catches": "import signal\nfor n in range(1, 65):\n    try:\n"
    "        signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\n"
    "def f(x):\n    while True:\n        try:\n            while True:\n                pass\n"
    "        except BaseException:\n            pass",
    "sleep": "import time\ndef f(x):\n    time.sleep(600)",
    "a memory bomb": "def f(x):\n    a = []\n    while True:\n        a.append(bytearray(1 << 20))",
    "a fork bomb": "import os\ndef f(x):\n    while True:\n        try:\n            os.fork()\n"
    "        except OSError:\n            pass",
    "a memory bomb that forks": "import os\nfor _ in range(9):\n    try:\n        os.fork()\n"
    "    except OSError:\n        pass\nblocks = []\ndef f(x):\n    while True:\n"
    "        try:\n            blocks.append(b'x' * (1 << 20))\n        except MemoryError:\n            pass",
    "a thread bomb": "import threading, time\ndef f(x):\n    while True:\n"
    "        threading.Thread(target=time.sleep, args=(600,)).start()",
    "endless recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x):\n    return f(x)",
    "endless recursion in C": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x):\n"
    "    a = []\n    for _ in range(10 ** 7):\n        a = [a]\n    return repr(a)",
    "a pattern that runs for ever": "import re\ndef f(x):\n    return re.match('(a+)+$', 'a' * 60 + 'b')",
    "a file bomb": "def f(x):\n    n = 0\n    while True:\n        n += 1\n"
    "        open('rrl-attack-%d' % n, 'wb').write(b'x' * (64 << 20))",
    # stays
    "a sleeping grandchild": "import os, time\ndef f(x):\n    if os.fork() == 0:\n"
    "        time.sleep(600)\n    return 1",
    "a daemon": "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n"
    "        if os.fork() == 0:\n            os.closerange(0, 4096)\n            time.sleep(600)\n"
    "        os._exit(0)\n    return 1",
    "a daemon that forks for ever": "import os, signal\ndef f(x):\n    if os.fork() == 0:\n"
    "        os.setsid()\n        while True:\n            try:\n                os.fork() and os._exit(0)\n"
    "            except OSError:\n                pass\n    return 1",
    "a process without death signal": "import os, time, ctypes\ndef f(x):\n"
    "    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n    os.fork() or time.sleep(600)\n    return 1",
    "a thread that goes on": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    "def f(x):\n    return 1",
    "at exit": "import atexit, time\natexit.register(time.sleep, 600)\ndef f(x):\n    return 1",
    # breaks out
    "writes elsewhere": "import os\nfor path in ('/tmp', '/var/tmp', '/dev/shm', '{folder}', '/', '/root'):\n"
    "    try:\n        open(path + '/rrl-attack', 'w').write('x')\n    except OSError:\n        pass\n"
    "def f(x):\n    return 1",
    "removes": "import shutil\nshutil.rmtree('{folder}', ignore_errors=True)\ndef f(x):\n    return 1",
    "the network": "import socket\ndef f(x):\n"
    "    return int(socket.create_connection(('127.0.0.1', {port}), 2).recv(100))",
    "the network by name": "import urllib.request\ndef f(x):\n"
    "    return int(urllib.request.urlopen('http://localhost:{port}/', timeout=2).read())",
    "signals to the parent": "import os\nfor pid in ({parent}, os.getppid(), -1, 0):\n    try:\n"
    "        os.kill(pid, 9)\n    except OSError:\n        pass\ndef f(x):\n    return 1",
    "more rights": "import os\ndef f(x):\n    os.setuid(0)\n    os.setgroups([0])\n    return 1",
    "other limits": "import resource\ndef f(x):\n"
    "    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n    return 1 / 0",
    "its own namespaces": "import ctypes, os\nlibc = ctypes.CDLL(None)\ndef f(x):\n"
    "    libc.unshare(0x10020000)\n    libc.mount(b'proc', b'/tmp', b'proc', 0, None)\n"
    "    return os.listdir('/tmp')",
    "out of the root": "import os\ndef f(x):\n    os.mkdir('a')\n    os.chroot('a')\n"
    "    for _ in range(99):\n        os.chdir('..')\n    os.chroot('.')\n    return open('{secret}').read()",
    "a program with more rights": "import os, subprocess\ndef f(x):\n"
    "    return subprocess.run(['su', '-c', 'cat {secret}'], capture_output=True).stdout.decode()",
}
