-- metrics - how a run goes: the progress line, and metrics.jsonl with one object a step.
--
--     step 1200/18865 | loss 3.2841 | gnorm 0.41 | lr 5.98e-04 | 301 ms (data 1%) | 17.4k tok/s |
--     mem 1.2/24 GiB | eta 1h29m                                  (one line)
--
-- Times, the share of data and tok/s are means over the steps since the last line that stayed, of
-- steps alone: evaluations and checkpoints between them do not count. mem is the peak so far of all
-- tensors of the rank that needs most, beside the limit. On a terminal the line is rewritten in
-- place and stays every `every` steps; elsewhere only those lines are written.
--
-- Invariants:
--  1. Only rank 0 writes.
--  2. The file's steps ascend; a resumed run cuts it back to the resumed step first, and a new run
--     in an old directory puts the old file aside. Nothing else is ever taken from it.
local rille = require "rille"
local core = rille.core
local expect = require "rille.expect"
local fail = require "rille.fail"
local known = require "rille.known"

local FILE = "metrics.jsonl"
local REDRAW_SECONDS = 0.05 -- of the line in place

---@class rille.Metrics
local Metrics = {}
Metrics.__index = Metrics

-- ---- numbers as people read them

local function count_text(x)
  if x < 1e3 then return ("%.0f"):format(x) end
  if x < 1e6 then return ("%.1fk"):format(x / 1e3) end
  return ("%.1fM"):format(x / 1e6)
end

local function duration_text(seconds)
  if seconds >= 10 then return ("%.1f s"):format(seconds) end
  local ms = seconds * 1e3
  return (ms < 10 and "%.1f ms" or "%.0f ms"):format(ms)
end

local function eta_text(seconds)
  local s, m, h = seconds + 0.5, seconds / 60 + 0.5, seconds / 3600 + 0.5 -- to the nearest unit
  if s < 60 then return ("%.0fs"):format(s // 1) end
  if s < 3600 then return ("%.0fm%02.0fs"):format(s // 60, s // 1 % 60) end
  if m < 1440 then return ("%.0fh%02.0fm"):format(m // 60, m // 1 % 60) end
  return ("%.0fd%02.0fh"):format(h // 24, h // 1 % 24)
end

-- peak: in bytes, of the rank that needs most.
local function memory_text(peak, limit)
  local GiB <const>, MiB <const> = 1 << 30, 1 << 20
  local function short(x) return (x < 9.95 and "%.1f" or "%.0f"):format(x) end
  if limit < GiB then return ("mem %s/%s MiB"):format(short(peak / MiB), short(limit / MiB)) end
  limit = short(limit / GiB):gsub("%.0$", "")
  if peak < 0.1 * GiB then return ("mem %s MiB/%s GiB"):format(short(peak / MiB), limit) end
  return ("mem %s/%s GiB"):format(short(peak / GiB), limit)
end

local function loss_text(x) return x == x and ("%.4f"):format(x) or "nan" end -- printf: "-nan"

local function norm_text(x)
  if x ~= x then return "nan" end
  return (x ~= 0 and (x < 0.01 or x >= 1e4) and "%.1e" or "%.2f"):format(x)
end

-- ---- the progress line

local function line_of(self, r)
  local parts = { ("step %d%s"):format(r.step, self.total and "/" .. self.total or "") }
  local function add(...) table.insert(parts, string.format(...)) end
  if r.loss then add("loss %s", loss_text(r.loss)) end
  if r.grad_norm then add("gnorm %s", norm_text(r.grad_norm)) end
  if r.lr then add("lr %.2e", r.lr) end
  local since = self.since
  local seconds = since.seconds / since.steps
  if seconds > 0 then
    add("%s (data %.0f%%)", duration_text(seconds), 100 * since.data / since.seconds)
    if since.tokens > 0 then add("%s tok/s", count_text(since.tokens / since.seconds)) end
  end
  local memory = r.memory
  if memory then
    add("%s", memory_text(r.peak and r.peak.bytes or memory.total.peak, memory.limit))
  end
  if self.total and seconds > 0 then
    add("eta %s", eta_text(math.max(self.total - r.step, 0) * seconds))
  end
  return table.concat(parts, " | ")
end

-- Writes over the line in place, which may be longer or wider than the terminal.
local function draw(self, line)
  if #line >= self.columns then line = line:sub(1, self.columns - 1) end
  self.out:write("\r", line, "\27[K")
  self.out:flush()
  self.shown = line
end

local function show(self, r)
  if self.every == 0 then return end
  local line = line_of(self, r)
  local stays = self.n_steps == 1 or r.step % self.every == 0 or r.step == self.total
  if stays then
    self.out:write(self.columns and "\r" or "", line, self.columns and "\27[K" or "", "\n")
    self.out:flush()
    self.shown = nil
    self.since = { steps = 0, seconds = 0, data = 0, tokens = 0 }
  elseif self.columns and core.clock() - self.drawn >= REDRAW_SECONDS then
    self.drawn = core.clock()
    draw(self, line)
  end
end

--- Prints a line of text; the progress line in place moves below it.
---@param text string
function Metrics:say(text)
  expect("Metrics:say", "text", text, "string")
  if self.is_silent then return end
  local shown = self.shown
  self.out:write(shown and "\r\27[K" or "", text, "\n")
  if shown then draw(self, shown) end
  self.out:flush()
end

-- ---- metrics.jsonl

local function json(value)
  if value == nil then return "null" end
  return core.json_encode(value)
end

local function object_of(self, r)
  local parts = {}
  local function add(name, value) table.insert(parts, ("%s:%s"):format(json(name), json(value))) end
  add("step", r.step)
  add("loss", r.loss)
  add("grad_norm", r.grad_norm)
  add("lr", r.lr)
  add("tokens", r.tokens)
  add("seconds", r.seconds)
  add("data_seconds", r.data_seconds)
  add("tokens_per_second", r.tokens and r.seconds and r.seconds > 0 and r.tokens / r.seconds or nil)
  add("flops", r.flops)
  add("mfu", r.flops and self.peak_flops and r.flops / r.seconds / self.peak_flops or nil)
  add("memory", r.memory)
  add("peak", r.peak)
  add("bubble", r.bubble)
  add("layout", self.layout)
  local extra = {}
  for name in pairs(r.extra or {}) do table.insert(extra, name) end
  table.sort(extra)
  for _, name in ipairs(extra) do add(name, r.extra[name]) end
  return "{" .. table.concat(parts, ",") .. "}\n"
end

-- A file of an earlier run gets the first free name metrics-1.jsonl, metrics-2.jsonl, ...
local function put_aside(self)
  if not core.stat(self.path) then return end
  local n = 1
  while core.stat(("%s/metrics-%d.jsonl"):format(self.dir, n)) do n = n + 1 end
  local moved, why = os.rename(self.path, ("%s/metrics-%d.jsonl"):format(self.dir, n))
  if not moved then fail("metrics: the file of an earlier run cannot be put aside: %s", why) end
end

local function write(self, r)
  if not self.file then
    core.make_directory(self.dir)
    if not self.is_resumed then put_aside(self) end
    local file, why = io.open(self.path, "a")
    if not file then fail("metrics: %s", why) end
    self.file, self.is_resumed = file, true -- what comes after close() is appended
  end
  local written, why = self.file:write(object_of(self, r))
  if written then written, why = self.file:flush() end
  if not written then fail("metrics: writing %s failed: %s", self.path, why) end
end

--- Cuts metrics.jsonl back to its objects up to and with `step`; a last line that is not whole
--- goes too. Steps after this one are appended.
---@param step integer
function Metrics:resume(step)
  expect("Metrics:resume", "step", step, "count")
  self.is_resumed = true
  if not self.path or self.is_silent or not core.stat(self.path) then return end
  if self.file then self.file:close() self.file = nil end
  local file, why = io.open(self.path, "rb")
  if not file then fail("metrics: %s", why) end
  local keep = 0
  for line in file:lines("L") do
    local found = line:match('^{"step":(%d+),.*}\n$')
    if not found or math.tointeger(found) > step then break end
    keep = keep + #line
  end
  file:close()
  if keep < core.stat(self.path).size then core.truncate(self.path, keep) end
end

-- ---- the object

local option_names = { "dir", "total", "every", "resumed", "layout", "peak_flops", "out" }

local function check_options(o)
  known("Metrics", o, option_names)
  expect.option("Metrics", "dir", o.dir, "path?")
  expect.option("Metrics", "total", o.total, "count?")
  expect.option("Metrics", "every", o.every, "count?")
  expect.option("Metrics", "resumed", o.resumed, "count?")
  expect.option("Metrics", "layout", o.layout, "table?")
  expect.option("Metrics", "peak_flops", o.peak_flops, "number?")
end

--- What follows a run: rille.Metrics{dir = "runs/a", total = 1000, every = 10}.
---@param o table {dir = where metrics.jsonl goes (nil: nowhere), total = steps planned, every =
--- steps between progress lines (10; 0: none), resumed = the step that a resumed run stands at,
--- layout = {dp =, tp =, pp =}, peak_flops = of the devices (for mfu), out = a file (io.stdout)}
---@return rille.Metrics
local function new(o)
  o = o or {}
  check_options(o)
  local out = o.out or io.stdout
  local self = setmetatable({
    dir = o.dir, path = o.dir and o.dir .. "/" .. FILE, total = o.total, every = o.every or 10,
    layout = o.layout or { dp = 1, tp = 1, pp = 1 }, peak_flops = o.peak_flops, out = out,
    -- A launcher gives ranks a terminal whether or not it has one itself: no line in place there.
    columns = out == io.stdout and core.world == 1 and core.columns(1) or nil,
    is_silent = core.rank > 0, n_steps = 0, drawn = 0,
    since = { steps = 0, seconds = 0, data = 0, tokens = 0 },
  }, Metrics)
  if o.resumed and o.resumed > 0 then self:resume(o.resumed) end
  return self
end

--- Takes what a step gave: {step =, loss =, grad_norm =, lr =, tokens =, seconds =, data_seconds =,
--- memory = core.memory(), peak = {bytes =, rank =} of the rank that needs most, flops =, bubble =,
--- extra = {...}}; only step must be there.
---@param r table
function Metrics:step(r)
  expect("Metrics:step", "the argument", r, "table")
  expect("Metrics:step", "step", r.step, "integer")
  if self.is_silent then return end
  local since = self.since
  self.n_steps = self.n_steps + 1
  since.steps = since.steps + 1
  since.seconds = since.seconds + (r.seconds or 0)
  since.data = since.data + (r.data_seconds or 0)
  since.tokens = since.tokens + (r.tokens or 0)
  if self.path then write(self, r) end
  show(self, r)
end

--- Ends the progress line and the file; may be called again.
function Metrics:close()
  if self.shown then self.out:write("\n") self.out:flush() end
  self.shown = nil
  if self.file then self.file:close() end
  self.file = nil
end

return setmetatable({ Metrics = new }, { __call = function(_, o) return new(o) end })
