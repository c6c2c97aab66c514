-- report - figures as a table and as JSON.
--
-- A figure: {case, threads, sides = {name = summary}, missing = {name = reason}, machine = spread}
-- A summary: {best, median (seconds), runs, peak_bytes, loss, version, busy, waited (shares of the
--   time with communication under way, and without anything else to do)}
-- A spread: {what ("fma" GFLOP/s or "copy" GB/s), best, median, worst}
local report = {}

local function sorted(list)
  local copy = table.move(list, 1, #list, 1, {})
  table.sort(copy)
  return copy
end

function report.summary(seconds, stats, info)
  local list = sorted(seconds)
  return {
    best = list[1], median = list[(#list + 1) // 2], runs = #list, peak_bytes = stats.peak_bytes,
    loss = stats.loss, version = info.version, busy = stats.busy, waited = stats.waited,
  }
end

function report.spread(values, what)
  local list = sorted(values)
  return { what = what, best = list[#list], median = list[(#list + 1) // 2], worst = list[1] }
end

local SCALE <const> = { us = 1e6, ms = 1e3 }
local TITLES <const> = {
  rille = "Rille", eager = "PyTorch", compile = "torch.compile", ["llm.c"] = "llm.c",
  halves = "two halves", ["1f1b"] = "PyTorch 1F1B",
}
local ORDER <const> = { "rille", "halves", "eager", "1f1b", "compile", "llm.c" }

function report.heading(machine)
  for _, entry in ipairs(machine) do io.write(("%-9s %s\n"):format(entry[1], entry[2])) end
  io.write("\nbest / median of rounds taken in turns; x: the peer's median over Rille's\n")
end

-- The share of the machine's limit that a side reaches, by medians.
local function share(figure, summary)
  local case, limit = figure.case, figure.machine.median
  local amount = case.flops or case.bytes
  return amount and summary.median and amount * 1e-9 / summary.median / limit or nil
end

function report.line(figure)
  local case = figure.case
  io.write(("\n%s, %d thread%s\n"):format(case.what, figure.threads,
    figure.threads > 1 and "s" or ""))
  local rille = figure.sides.rille
  for _, name in ipairs(ORDER) do
    local s = figure.sides[name]
    if s and s.best then
      local scale = SCALE[case.unit]
      local words = ("  %-14s %9.3f / %9.3f %s"):format(TITLES[name], s.best * scale,
        s.median * scale, case.unit)
      if name ~= "rille" and rille and rille.median then
        words = words .. ("  %5.2f x"):format(s.median / rille.median)
      else
        words = words .. "         "
      end
      if case.tokens then
        words = words .. ("  %5.0f tokens/s"):format(case.tokens / s.median)
      end
      local part = share(figure, s)
      if part then words = words .. ("  %3.0f%% of %s"):format(100 * part, figure.machine.what) end
      if case.memory and s.peak_bytes then
        words = words .. ("  peak %4.0f MB"):format(s.peak_bytes / 1e6)
      end
      if s.busy and s.busy > 0 then
        words = words .. ("  communication %.1f%% of the time, %.0f%% of it hidden"):format(
          100 * s.busy, 100 * (1 - s.waited / s.busy))
      end
      io.write(words, "\n")
    elseif figure.missing[name] then
      io.write(("  %-14s -- %s\n"):format(TITLES[name], figure.missing[name]))
    end
  end
  local m = figure.machine
  io.write(("  %-14s %s best %.0f, median %.0f, worst %.0f %s%s\n"):format("machine", m.what,
    m.best, m.median, m.worst, m.what == "fma" and "GFLOP/s" or "GB/s",
    m.worst < 0.8 * m.best and "  DISTURBED: look at the best, or repeat" or ""))
  io.stdout:flush()
end

-- Adds calls, seconds and flops of `part` to the row `name` of a list, made where it is missing.
local function add_up(list, by_name, name, part)
  local row = by_name[name] or { what = name, calls = 0, seconds = 0, flops = 0 }
  if not by_name[name] then table.insert(list, row) end
  by_name[name] = row
  for _, key in ipairs { "calls", "seconds", "flops" } do row[key] = row[key] + part[key] end
  row.best = math.max(row.best or 0, part.flops / part.seconds)
end

-- "total;what,calls,seconds,flops;..." of some steps -> the time of a step, kinds of ops, rows.
local function read_profile(answers)
  local total, kinds, by_kind, rows, by_what = 0, {}, {}, {}, {}
  for _, answer in ipairs(answers) do
    for part in answer:gmatch("[^;]+") do
      local what, calls, seconds, flops = part:match("^(.*),(%d+),([^,]+),([^,]+)$")
      local n = #answers
      local row = { calls = (tonumber(calls) or 0) / n, flops = (tonumber(flops) or 0) / n,
        seconds = tonumber(seconds or part) / n }
      if what then
        add_up(kinds, by_kind, what:match("^%S+"), row)
        add_up(rows, by_what, what, row)
      else
        total = total + row.seconds
      end
    end
  end
  return total, kinds, rows
end

--- A profile, as the worker gives it for each of some steps: kinds of ops by their share of the
--- step, and the products by shape with the share of the FMA peak that they reach.
function report.profile(answers, facts)
  local total, kinds, rows = read_profile(answers)
  local rest = { what = "the rest", calls = 0, seconds = total, flops = 0 }
  for _, kind in ipairs(kinds) do rest.seconds = rest.seconds - kind.seconds end
  table.insert(kinds, rest)
  local function by_time(a, b) return a.seconds > b.seconds end
  table.sort(kinds, by_time)
  table.sort(rows, by_time)
  io.write(("%s, %d thread%s: %.0f ms a step; FMA peak %.0f GFLOP/s\n"):format(facts.what,
    facts.threads, facts.threads > 1 and "s" or "", total * 1e3, facts.peak * 1e-9))
  local function line(row)
    local speed = row.is_shape and row.best or row.flops / row.seconds
    local reached = row.flops > 0 and ("%4.0f%% of the peak%s"):format(100 * speed / facts.peak,
      row.is_shape and " at best" or "") or ""
    local text = ("  %5.1f%%  %-28s %4s x %7.2f ms  %s"):format(100 * row.seconds / total, row.what,
      row.calls > 0 and ("%.0f"):format(row.calls) or "",
      row.seconds * 1e3 / math.max(row.calls, 1), reached)
    io.write((text:gsub("%s+$", "")), "\n")
  end
  for _, kind in ipairs(kinds) do
    if kind.seconds >= 0.005 * total then line(kind) end
  end
  io.write("  the products by shape (rows x summed x columns)\n")
  for _, row in ipairs(rows) do
    row.is_shape = row.what:find(" ") ~= nil
    if row.is_shape and row.seconds >= 0.005 * total then line(row) end
  end
end

function report.kernels(lines)
  if #lines == 0 then return end
  io.write("\nkernels, as a share of the FMA peak or of the copy bandwidth beside them\n")
  for _, line in ipairs(lines) do
    local function field(name) return line:match('"' .. name .. '":"?([^,"}]*)') end
    if field "ns" then
      io.write(("  %-34s %s ns a call\n"):format(field "kernel", field "ns"))
    else
      io.write(("  %-34s %d threads  best %.2f  median %.2f  (%s)\n"):format(field "kernel",
        tonumber(field "threads"), tonumber(field "share_best"), tonumber(field "share_median"),
        field "level"))
    end
  end
end

--- The promises, kept or not.
function report.footnotes(figures)
  io.write("\npromises\n")
  local function verdict(kept, words)
    io.write(("  %-10s %s\n"):format(kept and "kept" or "NOT KEPT", words))
  end
  for _, figure in ipairs(figures) do
    local case, rille = figure.case, figure.sides.rille
    local where = ("%s, %d thread(s)"):format(case.name, figure.threads)
    for _, name in ipairs(ORDER) do
      local goal, peer = case.goals[name], figure.sides[name]
      if goal and rille and rille.median and peer and peer.median then
        local ratio = peer.median / rille.median
        verdict(ratio >= goal, ("%s: %.2f x %s (%.2f promised)"):format(where, ratio, TITLES[name],
          goal))
      end
    end
    local peer = figure.sides.eager
    if case.memory_goal and rille and rille.peak_bytes and peer and peer.peak_bytes then
      verdict(rille.peak_bytes <= case.memory_goal * peer.peak_bytes,
        ("%s: %.2f of PyTorch's peak memory (%.2f promised)"):format(where,
          rille.peak_bytes / peer.peak_bytes, case.memory_goal))
    end
    if case.limit and rille and rille.median then
      verdict(rille.median < case.limit, ("%s: %.3g s (under %.3g promised)"):format(where,
        rille.median, case.limit))
    end
  end
end

local function json(value)
  if type(value) == "string" then
    return '"' .. value:gsub('[%c"\\]', function(c) return ("\\u%04x"):format(c:byte()) end) .. '"'
  elseif type(value) ~= "table" then
    return math.type(value) == "float" and ("%.9g"):format(value) or tostring(value)
  end
  local keys, parts = {}, {}
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys)
  for i, key in ipairs(keys) do parts[i] = json(key) .. ": " .. json(value[key]) end
  return "{" .. table.concat(parts, ", ") .. "}"
end

function report.write_json(path, machine, figures, kernels)
  local facts, lines = {}, {}
  for _, entry in ipairs(machine) do facts[entry[1]] = entry[2] end
  for i, f in ipairs(figures) do
    lines[i] = "    " .. json { name = f.case.name, what = f.case.what, threads = f.threads,
      shape = f.case.shape or {}, flops = f.case.flops, bytes = f.case.bytes, sides = f.sides,
      missing = f.missing, machine = f.machine }
  end
  local file <close> = assert(io.open(path, "w"))
  file:write('{"machine": ', json(facts), ',\n  "figures": [\n', table.concat(lines, ",\n"),
    '\n  ],\n  "kernels": [\n    ', table.concat(kernels, ",\n    "), "\n  ]\n}\n")
  io.write("\nwritten: ", path, "\n")
end

return report
