-- worker - one side of a benchmark, kept alive in a process of its own.
--
--     driver                         worker (Rille, PyTorch, llm.c, probe)
--       start  ------------------->  builds its case, warms up
--              <-------------------  "ready KEY=VALUE ..." or "missing REASON"
--       "run 3" ------------------>
--              <-------------------  "0.31 0.30 0.30": the seconds of each run
--       "stats" ------------------>
--              <-------------------  "peak_bytes=1048576 loss=5.5413"
--
-- A process for each case and side: peaks of memory are its own, and sides can alternate.
local Worker = {}
local started = 0
Worker.__index = Worker

local function quote(word) return "'" .. word:gsub("'", "'\\''") .. "'" end

local function capture(command)
  local pipe <close> = assert(io.popen(command .. " 2>/dev/null"))
  return (pipe:read("a"):gsub("%s+$", ""))
end

--- Where a worker of that many threads runs: a command prefix that binds it to cores.
local function binding(threads)
  local list = capture("taskset -pc $$ | sed 's/.*: //'")
  local cores = {}
  for first, last in list:gmatch("(%d+)%-?(%d*)") do
    for core = tonumber(first), tonumber(last) or tonumber(first) do cores[#cores + 1] = core end
  end
  if #cores < threads then return "" end
  return "taskset -c " .. table.concat(cores, ",", 1, threads) .. " "
end

local function key_values(line)
  local values = {}
  for key, value in line:gmatch("([%w_]+)=(%S+)") do values[key] = tonumber(value) or value end
  return values
end

--- Starts a worker. environment: a table of variables. A worker that cannot start has .missing, the
--- reason in words.
function Worker.start(command, threads, environment, folder)
  local self = setmetatable({}, Worker)
  started = started + 1
  self.answers_path = folder .. "/answers" .. started
  self.log_path = folder .. "/log" .. started
  assert(os.execute("mkfifo " .. quote(self.answers_path)))
  local words = {}
  for name, value in pairs(environment) do words[#words + 1] = name .. "=" .. quote(value) end
  self.requests = assert(io.popen(("env %s %s%s >%s 2>%s"):format(table.concat(words, " "),
    binding(threads), command, quote(self.answers_path), quote(self.log_path)), "w"))
  self.answers = assert(io.open(self.answers_path, "r"))
  local line = self:read()
  if line and line:find("^ready") then
    self.info = key_values(line)
  else
    self.missing = self.missing or (line or ""):gsub("^missing%s*", "")
  end
  return self
end

function Worker:read()
  local line = self.answers:read("l")
  if line then return line end
  local log = io.open(self.log_path)
  local last = "ended without an answer"
  for words in log and log:lines() or function() end do
    if words:find("%S") then last = words end
  end
  if log then log:close() end
  self.missing = last
end

--- The answer to a request, or nil: then .missing has the reason.
function Worker:ask(request)
  if self.missing then return nil end
  self.requests:write(request, "\n")
  self.requests:flush()
  local line = self:read()
  if line and line:find("^unknown") then self.missing = line end
  return not self.missing and line or nil
end

--- A list of numbers.
function Worker:numbers(request)
  local numbers = {}
  for word in (self:ask(request) or ""):gmatch("%S+") do numbers[#numbers + 1] = tonumber(word) end
  return numbers
end

function Worker:stats() return key_values(self:ask("stats") or "") end

function Worker:stop()
  self.requests:close()
  self.answers:close()
  os.remove(self.answers_path)
end

return { start = Worker.start, quote = quote, capture = capture }
