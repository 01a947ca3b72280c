//! Estimates the cost of calls.

use super::{CostEstimator, DeclPath, EntrySizes};
use crate::ast::{ExprKind, Id, Literal};
use crate::decl::Decl;
use crate::estimate::range::Estimate;
use crate::eval::cost::{
    AUTHORIZER_CHECK_COST, FORMAT_REGEX_LENGTH, LIST_CREATE_BASE_COST, REGEX_STRING_LENGTH_COST_FACTOR,
    STRING_TRAVERSAL_COST_FACTOR, STRUCT_CREATE_BASE_COST,
};
use crate::types::Type;

/// The cost of a call, and the size of its result if it is known.
struct CallEstimate {
    cost: Estimate,
    size: Option<Estimate>,
}

impl CallEstimate {
    fn new(cost: Estimate) -> CallEstimate {
        CallEstimate { cost, size: None }
    }

    fn sized(cost: Estimate, size: Estimate) -> CallEstimate {
        CallEstimate { cost, size: Some(size) }
    }
}

const ONE: Estimate = Estimate::fixed(1);
/// The size of an IP address in bytes.
const ADDRESS_SIZE: Estimate = Estimate { min: 4, max: 16 };
const MAX_FORMAT_NAME_LENGTH: u64 = 64;

impl<'a> CostEstimator<'a> {
    pub(super) fn call(&mut self, id: Id, function: &str, target: Option<Id>, args: &'a [Id]) -> Estimate {
        if let ("dyn", [arg]) = (function, args) {
            let cost = ONE.add(self.cost(*arg));
            self.copy_sizes(id, *arg);
            return cost;
        }
        let arg_cost_list: Vec<Estimate> = args.iter().map(|arg| self.cost(*arg)).collect();
        if function == "_?._" {
            // An optional field selection is represented as a call.
            return ONE.add(arg_cost_list[0]);
        }
        let overloads = self.checked.overloads(id);
        if overloads.is_empty() {
            return Estimate::ZERO;
        }
        let before = target.map_or(Estimate::ZERO, |target| self.cost(target));
        let mut cost = Estimate { min: u64::MAX, max: 0 };
        let mut size: Option<Estimate> = None;
        for overload in overloads {
            let one = self.overload(id, function, overload.id, target, args, &arg_cost_list);
            cost = cost.union(one.cost);
            if let Some(one) = one.size {
                size = Some(size.map_or(one, |size| size.union(one)));
            }
            if matches!(overload.id, "index_list" | "index_map") {
                size = self.entries_of(args[0]).map(|entries: EntrySizes| entries.value);
                let origin = self.path_inside(args[0], |decl| decl.items.as_deref());
                self.path_decls.insert(id, origin);
            }
            size = size.or_else(|| self.size(id));
        }
        if let Some(size) = size {
            self.size_cache.insert(id, size);
        }
        before.add(cost)
    }

    fn overload(
        &mut self,
        id: Id,
        function: &str,
        overload: &str,
        target: Option<Id>,
        args: &[Id],
        arg_cost_list: &[Estimate],
    ) -> CallEstimate {
        let arguments = arg_cost_list.iter().fold(Estimate::ZERO, |sum, cost| sum.add(*cost));
        let known = self
            .list_call(function, overload, target, args)
            .or_else(|| self.kubernetes_call(function, overload, target, args));
        if let Some(known) = known {
            return CallEstimate { cost: known.cost.add(arguments), ..known };
        }
        if overload == "logical_and" || overload == "logical_or" {
            return CallEstimate::new(Estimate {
                min: arg_cost_list[0].min,
                max: arg_cost_list[0].add(arg_cost_list[1]).max,
            });
        }
        if overload == "conditional" {
            let size = self.size_or_unknown(args[1]).union(self.size_or_unknown(args[2]));
            if let Some(entries) = EntrySizes::union(self.entries_of(args[1]), self.entries_of(args[2])) {
                self.entry_sizes.insert(id, entries);
            }
            return CallEstimate::sized(arg_cost_list[0].add(arg_cost_list[1].union(arg_cost_list[2])), size);
        }
        let call = self.standard_call(id, overload, target, args);
        CallEstimate { cost: call.cost.add(arguments), ..call }
    }

    fn standard_call(&mut self, id: Id, overload: &str, target: Option<Id>, args: &[Id]) -> CallEstimate {
        let first = args.first().map_or(Estimate::UNKNOWN, |arg| self.size_or_unknown(*arg));
        match (overload, target) {
            ("string_format", Some(target)) => {
                CallEstimate::new(self.size_or_unknown(target).scaled(STRING_TRAVERSAL_COST_FACTOR))
            }
            ("string_to_bytes", _) => CallEstimate::sized(
                first.scaled(STRING_TRAVERSAL_COST_FACTOR),
                Estimate { min: first.min, max: first.max.saturating_mul(4) },
            ),
            ("bytes_to_string", _) => CallEstimate::sized(
                first.scaled(STRING_TRAVERSAL_COST_FACTOR),
                Estimate { min: first.min / 4, max: first.max },
            ),
            ("strings_quote", _) => {
                let max_size = first.max.saturating_mul(2).saturating_add(2);
                CallEstimate::sized(
                    first.scaled(STRING_TRAVERSAL_COST_FACTOR),
                    Estimate { min: first.min.saturating_add(2), max: max_size },
                )
            }
            ("affix", _) => CallEstimate::new(first.scaled(STRING_TRAVERSAL_COST_FACTOR)),
            ("in_list", _) => CallEstimate::new(self.size_or_unknown(args[1])),
            ("matches_string", Some(target)) => {
                let text = self.size_or_unknown(target).add(ONE).scaled(STRING_TRAVERSAL_COST_FACTOR);
                CallEstimate::new(text.multiply(first.scaled(REGEX_STRING_LENGTH_COST_FACTOR)))
            }
            ("contains_string", Some(target)) => CallEstimate::new(
                self.size_or_unknown(target)
                    .scaled(STRING_TRAVERSAL_COST_FACTOR)
                    .multiply(first.scaled(STRING_TRAVERSAL_COST_FACTOR)),
            ),
            ("add_string" | "add_bytes" | "add_list", _) => {
                let size = first.add(self.size_or_unknown(args[1]));
                if let Some(entries) = EntrySizes::union(self.entries_of(args[0]), self.entries_of(args[1])) {
                    self.entry_sizes.insert(id, entries);
                }
                CallEstimate::sized(
                    if overload == "add_list" { ONE } else { size.scaled(STRING_TRAVERSAL_COST_FACTOR) },
                    size,
                )
            }
            ("compare_text" | "equals" | "not_equals", _) => {
                let max_size = first.max.min(self.size_or_unknown(args[1]).max);
                CallEstimate::new(
                    Estimate { min: u64::from(max_size > 0), max: max_size }
                        .scaled(STRING_TRAVERSAL_COST_FACTOR),
                )
            }
            _ => CallEstimate::new(ONE),
        }
    }

    /// The functions of the lists and sets libraries.
    fn list_call(
        &mut self,
        function: &str,
        overload: &str,
        target: Option<Id>,
        args: &[Id],
    ) -> Option<CallEstimate> {
        let allocating = |factor: f64, size: Estimate| {
            CallEstimate::sized(size.scaled(factor).add(Estimate::fixed(1 + LIST_CREATE_BASE_COST)), size)
        };
        Some(match (function, target, args) {
            ("sets.contains" | "sets.intersects" | "sets.equivalent", None, [a, b]) => {
                let factor = if function == "sets.equivalent" { 2.0 } else { 1.0 };
                let pairs = self.size_or_unknown(*a).multiply(self.size_or_unknown(*b));
                CallEstimate::new(pairs.scaled(factor).add(ONE))
            }
            ("slice", Some(target), [start, end]) => {
                let size = self.size_or_unknown(target);
                let (start, end) = (self.literal(*start, 0), self.literal(*end, size.max));
                allocating(1.0, Estimate::fixed(end.wrapping_sub(start)))
            }
            ("lists.range", None, [count]) => {
                allocating(1.0, Estimate::fixed(self.literal(*count, u64::MAX)))
            }
            ("reverse", Some(target), []) => allocating(1.0, self.size_or_unknown(target)),
            ("flatten", Some(target), args) => {
                let depth = args.first().map_or(1, |depth| self.literal(*depth, u64::MAX));
                allocating(depth as f64, self.size_or_unknown(target))
            }
            ("distinct" | "sort", Some(_), []) | ("@sortByAssociatedKeys", _, [_]) => {
                let list = args.first().copied().or(target)?;
                let size = self.size_or_unknown(list);
                let factor = if overload == "sort_text" { 2.0 + STRING_TRAVERSAL_COST_FACTOR } else { 2.0 };
                allocating(factor, size.multiply(size))
            }
            _ => return None,
        })
    }

    fn literal(&self, id: Id, otherwise: u64) -> u64 {
        match self.checked.ast.kind(id) {
            ExprKind::Literal(Literal::Int(value)) => (*value).max(0) as u64,
            _ => otherwise,
        }
    }

    fn kubernetes_call(
        &mut self,
        function: &str,
        overload: &str,
        target: Option<Id>,
        args: &[Id],
    ) -> Option<CallEstimate> {
        let first = args.first().map(|arg| self.size_or_unknown(*arg));
        let target_size = target.map(|target| self.size_or_unknown(target));
        Some(match function {
            "check" => CallEstimate::new(Estimate::fixed(AUTHORIZER_CHECK_COST)),
            "serviceAccount" | "path" | "group" | "resource" | "subresource" | "namespace" | "name"
            | "allowed" | "reason" | "error" | "errored" => CallEstimate::new(ONE),
            "fieldSelector" | "labelSelector" => {
                let length = first?;
                let requirements =
                    length.scaled(0.5).scaled((LIST_CREATE_BASE_COST + STRUCT_CREATE_BASE_COST) as f64);
                CallEstimate::new(
                    Estimate::fixed(LIST_CREATE_BASE_COST)
                        .add(length.scaled(STRING_TRAVERSAL_COST_FACTOR))
                        .add(requirements),
                )
            }
            "isSorted" | "sum" | "max" | "min" | "indexOf" | "lastIndexOf" => {
                let (target, size) = (target?, target_size?);
                match self.checked.ty(target) {
                    Type::List(item) => {
                        let mut each = ONE;
                        if matches!(**item, Type::String | Type::Bytes) {
                            each = each.add(self.item_size(target).scaled(STRING_TRAVERSAL_COST_FACTOR));
                        }
                        CallEstimate::new(size.multiply(each))
                    }
                    _ => CallEstimate::new(size.scaled(STRING_TRAVERSAL_COST_FACTOR)),
                }
            }
            "url" | "jsonpatch.escapeKey" if args.len() == 1 => {
                CallEstimate::sized(first?.scaled(STRING_TRAVERSAL_COST_FACTOR), first?)
            }
            "lowerAscii" | "upperAscii" | "substring" | "trim" => {
                CallEstimate::sized(target_size?.scaled(STRING_TRAVERSAL_COST_FACTOR), target_size?)
            }
            "replace" if args.len() >= 2 => {
                let size = target_size?;
                let result = replaced_size(size, first?, self.size_or_unknown(args[1]));
                CallEstimate::sized(size.scaled(2.0 * STRING_TRAVERSAL_COST_FACTOR), result)
            }
            "split" => {
                let size = target_size?;
                let max_size = args.get(1).map_or(size.max, |limit| match self.checked.ast.kind(*limit) {
                    ExprKind::Literal(Literal::Int(limit)) => *limit as u64,
                    _ => size.max,
                });
                CallEstimate::sized(
                    size.scaled(2.0 * STRING_TRAVERSAL_COST_FACTOR),
                    Estimate { min: 0, max: max_size },
                )
            }
            "join" => {
                let (target, count) = (target?, target_size?);
                let mut size = match self.checked.ty(target) {
                    Type::List(_) => count.multiply(self.item_size(target)),
                    _ => Estimate::ZERO,
                };
                if let Some(separator) = first {
                    let between =
                        Estimate { min: count.min.saturating_sub(1), max: count.max.saturating_sub(1) };
                    size = size.add(separator.multiply(between));
                }
                CallEstimate::sized(size.scaled(STRING_TRAVERSAL_COST_FACTOR), size)
            }
            "find" | "findAll" => {
                let (text, pattern) = (target_size?, first?);
                let cost = text
                    .add(ONE)
                    .scaled(STRING_TRAVERSAL_COST_FACTOR)
                    .multiply(pattern.scaled(REGEX_STRING_LENGTH_COST_FACTOR));
                CallEstimate::sized(cost, Estimate { min: 0, max: text.max })
            }
            "ip" if overload == "cidr_ip" => CallEstimate::new(ONE),
            "cidr" | "isIP" | "isCIDR" | "ip" | "quantity" | "isQuantity" | "semver" | "isSemver" => {
                CallEstimate::new(first?.scaled(STRING_TRAVERSAL_COST_FACTOR))
            }
            "ip.isCanonical" => CallEstimate::new(first?.scaled(2.0 * STRING_TRAVERSAL_COST_FACTOR)),
            "masked"
            | "prefixLength"
            | "family"
            | "isUnspecified"
            | "isLoopback"
            | "isLinkLocalMulticast"
            | "isLinkLocalUnicast"
            | "isGlobalUnicast" => CallEstimate::new(ONE),
            "containsIP" => {
                let mut cost = ADDRESS_SIZE.add(ADDRESS_SIZE).scaled(STRING_TRAVERSAL_COST_FACTOR);
                if overload == "cidr_contains_ip_string" {
                    cost = cost.add(first?.scaled(STRING_TRAVERSAL_COST_FACTOR));
                }
                CallEstimate::new(cost)
            }
            "containsCIDR" => {
                let mut cost = ADDRESS_SIZE
                    .add(ADDRESS_SIZE)
                    .scaled(STRING_TRAVERSAL_COST_FACTOR)
                    .add(ADDRESS_SIZE.scaled(STRING_TRAVERSAL_COST_FACTOR))
                    .add(ONE);
                if overload == "cidr_contains_cidr_string" {
                    cost = cost.add(first?.scaled(STRING_TRAVERSAL_COST_FACTOR));
                }
                CallEstimate::new(cost)
            }
            "validate" => CallEstimate::new(
                first?
                    .scaled(STRING_TRAVERSAL_COST_FACTOR)
                    .scaled(FORMAT_REGEX_LENGTH as f64 * REGEX_STRING_LENGTH_COST_FACTOR),
            ),
            "format.named" | "sign" | "asInteger" | "isInteger" | "asApproximateFloat" | "isGreaterThan"
            | "isLessThan" | "compareTo" | "add" | "sub" | "major" | "minor" | "patch" | "getScheme"
            | "getHostname" | "getHost" | "getPort" | "getEscapedPath" | "getQuery" => CallEstimate::new(ONE),
            "_==_" => return self.library_equality(args),
            _ => return None,
        })
    }

    /// The size of the items of a list.
    fn item_size(&self, list: Id) -> Estimate {
        match self.path_of(list) {
            DeclPath::Known(Decl { items: Some(item), .. }) => Estimate { min: 0, max: item.max },
            _ => Estimate::UNKNOWN,
        }
    }

    fn library_equality(&mut self, args: &[Id]) -> Option<CallEstimate> {
        let [a, b] = args else { return None };
        let (Type::Opaque(name, _), Type::Opaque(other, _)) = (self.checked.ty(*a), self.checked.ty(*b))
        else {
            return None;
        };
        if name != other {
            return None;
        }
        Some(CallEstimate::new(match *name {
            "kubernetes.NamedFormat" => {
                Estimate { min: 1, max: MAX_FORMAT_NAME_LENGTH }.scaled(STRING_TRAVERSAL_COST_FACTOR)
            }
            "kubernetes.URL" => {
                let max_size = self.size(*b).map_or(1, |size| size.max);
                Estimate { min: 1, max: max_size }.scaled(STRING_TRAVERSAL_COST_FACTOR)
            }
            name if name.starts_with("kubernetes.") || name.starts_with("net.") => ONE,
            _ => return None,
        }))
    }
}

/// The size of a string after all occurrences of a substring are replaced, given the sizes of all
/// three.
fn replaced_size(text: Estimate, old: Estimate, new: Estimate) -> Estimate {
    let mut count = Estimate::ZERO;
    let mut retained = Estimate::ZERO;
    if old.min == 0 {
        // An empty substring occurs before and after every character.
        count.max = text.max.saturating_add(1);
        retained.max = text.max;
    } else if new.max <= old.min {
        retained.max = text.max;
    } else {
        count.max = (text.max as f64 / old.min as f64).ceil() as u64;
    }
    if old.max == 0 {
        count.min = text.min.saturating_add(1);
        retained.min = text.min;
    } else if old.max <= new.min {
        retained.min = text.min;
    } else {
        count.min = (text.min as f64 / old.max as f64).ceil() as u64;
    }
    count.multiply(new).add(retained)
}
