-- sides - how each side of a benchmark is started, and what the machine is.
local report = require "report"
local worker = require "worker"
local quote, capture = worker.quote, worker.capture

local sides = {}

-- glibc's allocator then keeps what is freed instead of giving it back to the system and faulting
-- it in again at every step: a few per cent for PyTorch in eager mode.
local KEEP_MEMORY <const> = {
  MALLOC_MMAP_THRESHOLD_ = "4294967296", MALLOC_TRIM_THRESHOLD_ = "8589934592",
  MALLOC_TOP_PAD_ = "67108864",
}

-- is_many: of several processes, each with a core of its own: OpenMP would bind them all to the
-- first one, so they choose theirs themselves.
local function environment(threads, more, is_many)
  local result = { OMP_NUM_THREADS = tostring(threads), OMP_WAIT_POLICY = "passive" }
  if not is_many then result.OMP_PROC_BIND, result.OMP_PLACES = "true", "cores" end
  for name, value in pairs(more or {}) do result[name] = value end
  return result
end

-- Compiles one of our C files for this machine; returns the program's path, or nil and the reason.
local function compile(o, source, options)
  local program = o.scratch .. "/" .. source:gsub("%.c$", "")
  local log = o.scratch .. "/compile.log"
  local command = ("%s -march=native -fopenmp %s -o %s %s/%s -lm 2>%s"):format(
    os.getenv("CC") or "gcc", options, quote(program), quote(o.folder), source, quote(log))
  if os.execute(command) then return program end
  return nil, "does not compile: " .. capture("grep -m 1 error " .. quote(log))
end

--- Once, before everything else.
function sides.prepare(o)
  o.scratch = capture("mktemp -d")
  assert(o.scratch ~= "", "no temporary folder")
  o.rille = o.build .. "/rille"
  o.torch = capture(quote(o.python) .. " -c 'import torch; print(torch.__version__)'")
  local reason
  o.probe, reason = compile(o, "probe.c", "-O3")
  if not o.probe then
    io.stderr:write("bench: the probe ", reason, "\n")
    os.exit(1)
  end
end

function sides.finish(o) os.execute("rm -rf " .. quote(o.scratch)) end

local starters = {}

function starters.probe(o, _, threads)
  return quote(o.probe) .. " " .. threads, environment(threads)
end

-- The numbers that both workers of several ranks take.
local function shape_words(case)
  local s = case.shape
  return ("%d %d %d %d %d %d %d"):format(s.layers, s.heads, s.d, s.T, s.B, s.vocab,
    case.microbatches)
end

local function ranks_of_rille(o, case, what)
  return ("%s -n %d %s %s %s"):format(quote(o.rille), case.ranks,
    quote(o.folder .. "/pipeline.lua"), what, shape_words(case)), { RILLE_THREADS = "1" }
end

function starters.halves(o, case) return ranks_of_rille(o, case, "halves") end

function starters.rille(o, case, threads)
  if case.ranks then return ranks_of_rille(o, case, case.how) end
  return quote(o.rille) .. " " .. quote(o.folder .. "/rille.lua") .. " " .. case.name,
    { OMP_NUM_THREADS = tostring(threads) }
end

local function torch(mode)
  return function(o, case, threads)
    if o.torch == "" then
      return nil, "PyTorch is not installed for " .. o.python .. ": python3 -m venv ~/torch && " ..
        "~/torch/bin/pip install torch, then --python ~/torch/bin/python"
    end
    if case.ranks then
      local how = mode == "1f1b" and "pp" or case.how
      return ("%s %s %s %s %d"):format(quote(o.python), quote(o.folder .. "/peer_pipeline.py"),
        how, shape_words(case), case.ranks), environment(1, KEEP_MEMORY, true)
    end
    if mode == "compile" and not o.compile then return nil, "left out (--no-compile)" end
    return ("%s %s %s %d %s"):format(quote(o.python), quote(o.folder .. "/peer_torch.py"),
      case.name, threads, mode), environment(threads, KEEP_MEMORY)
  end
end
starters.eager, starters.compile = torch "eager", torch "compile"
starters["1f1b"] = torch "1f1b" -- the pipeline of one stage a rank, beside another schedule

starters["llm.c"] = function(o, case, threads)
  if not o.llmc then
    return nil, "needs a checkout: git clone https://github.com/karpathy/llm.c, then --llmc llm.c"
  end
  local reason
  if not o.llmc_program then
    -- Its own Makefile's flags; -include names the file whose functions peer_llmc.c times.
    o.llmc_program, reason = compile(o, "peer_llmc.c", "-Ofast -w -DOMP -DTESTING -I " ..
      quote(o.llmc) .. " -include " .. quote(o.llmc .. "/train_gpt2.c"))
    if not o.llmc_program then return nil, reason end
  end
  local s = case.shape
  return ("%s %d %d %d %d %d %d"):format(quote(o.llmc_program), s.layers, s.heads, s.d, s.T, s.B,
    s.vocab), environment(threads)
end

-- Whole processes, timed by a probe from fork to end.
local spawned = {
  rille = function(o) return quote(o.rille) .. " -e 'return 1'" end,
  eager = function(o) return quote(o.python) .. " -c 'import torch'" end,
}

--- Starts a side. Returns {name, worker, request, stats} or {missing = reason}.
function sides.start(o, name, case, threads)
  local command, reason = starters[name](o, case, threads)
  if not command then return { name = name, missing = reason } end
  if case.spawn and name ~= "probe" then
    local probe = worker.start(starters.probe(o, case, threads), threads, {}, o.scratch)
    local request = "spawn 1 " .. spawned[name](o)
    if (probe:numbers(request)[1] or -1) < 0 then
      return { name = name, missing = "does not run: " .. spawned[name](o) }
    end
    return { name = name, worker = probe, request = request }
  end
  local started = worker.start(command, threads, reason, o.scratch)
  if started.missing then return { name = name, missing = started.missing } end
  return { name = name, worker = started, request = "run 1", stats = true }
end

--- What the machine and the versions are, as an ordered list of {key, value}.
function sides.machine(o)
  if o.machine then return o.machine end
  o.machine = {
    { "cpu", capture("lscpu | sed -n 's/^Model name: *//p' | head -n 1") },
    { "cores", tonumber(capture("nproc")) or 0 },
    { "load", tonumber(capture("cut -d' ' -f1 /proc/loadavg")) or 0 },
    { "kernels", capture(quote(o.rille) .. " info | sed -n 's/^kernels *//p'") },
    { "rille", capture(quote(o.rille) .. " --version") },
    { "commit", capture("git rev-parse --short HEAD") },
    { "pytorch", o.torch ~= "" and o.torch or "not found" },
    { "compiler", capture((os.getenv("CC") or "gcc") .. " --version | head -n 1") },
  }
  return o.machine
end

--- The C kernels beside peak and copy in their own process: tests/bench_kernels prints JSON lines.
function sides.kernels(o)
  local lines, program = {}, o.build .. "/bench_kernels"
  local counts = table.concat(o.threads, ",")
  local pipe <close> = assert(io.popen(("%s --json --threads %s"):format(quote(program), counts)))
  for line in pipe:lines() do lines[#lines + 1] = line end
  if #lines == 0 then io.write("kernels: ", program, " printed nothing: make bench builds it\n") end
  return lines
end

local STEPS <const> = 5 -- of a profile

-- Where the time of the step goes by op, and what share of the FMA peak the products reach.
local function profile_ops(o, case, threads)
  local probe = sides.start(o, "probe", case, threads).worker
  local rille = sides.start(o, "rille", case, threads).worker
  local answers, peak = {}, probe:numbers("fma")[1] or 0
  for i = 1, STEPS do
    answers[i] = rille:ask("profile 1")
    peak = math.max(peak, probe:numbers("fma")[1] or 0)
  end
  probe:stop()
  rille:stop()
  if #answers < STEPS then
    io.stderr:write("bench: no profile: ", tostring(rille.missing), "\n")
    return false
  end
  report.profile(answers, { peak = peak * 1e9, threads = threads, what = case.what })
  return true
end

-- Function by function: perf samples the worker while it answers "run 10".
local function profile_functions(o, threads)
  local data, listing = quote(o.scratch .. "/perf.data"), quote(o.scratch .. "/perf.txt")
  local record = ("echo run 10 | OMP_NUM_THREADS=%d perf record -q -o %s %s %s gpt >%s 2>&1")
    :format(threads, data, quote(o.rille), quote(o.folder .. "/rille.lua"), listing)
  local show = ("perf report --stdio --no-children -F overhead,sym --percent-limit 1 -i %s "
    .. "2>/dev/null | grep '%%' >%s"):format(data, listing)
  if os.execute(record) and os.execute(show) then
    io.write("  share of samples, function (perf)\n", (capture("cat " .. listing)), "\n")
  else
    io.write("  functions: needs perf (Debian: linux-perf), and leave to use it\n")
  end
end

--- Where the time of Rille's training step goes. Returns an exit code.
function sides.profile(o, case)
  for _, threads in ipairs(o.threads) do
    if not profile_ops(o, case, threads) then return 1 end
    if o.functions then profile_functions(o, threads) end
  end
  return 0
end

return sides
