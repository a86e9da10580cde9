{{/* Names, labels and images that all objects share. */}}

{{- define "hps.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "hps.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "hps.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "hps.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Selector labels of services and workloads; with a role, of that role's pods. */}}
{{- define "hps.selector" -}}
app.kubernetes.io/name: {{ include "hps.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: without the chart's version, whose change would replace the pods. */}}
{{- define "hps.podLabels" -}}
{{ include "hps.selector" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "hps.labels" -}}
{{ include "hps.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* An object's metadata: root, role, suffix of its name, more labels, more annotations. */}}
{{- define "hps.metadata" -}}
name: {{ include "hps.fullname" .root }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "hps.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "hps.image" -}}
{{- $image := .root.Values.image -}}
{{- $name := $image.repository -}}
{{- if $image.registry }}{{ $name = printf "%s/%s" $image.registry $name }}{{ end -}}
{{- $digest := ternary $image.gpuDigest $image.digest (gt (int .gpus) 0) -}}
{{- if $digest -}}
{{- printf "%s@%s" $name $digest -}}
{{- else -}}
{{- printf "%s:%s%s" $name (default .root.Chart.AppVersion $image.tag) (ternary $image.gpuSuffix "" (gt (int .gpus) 0)) -}}
{{- end -}}
{{- end -}}

{{/* Scheduling of pods: takes root, and a role's own values if it has any. */}}
{{- define "hps.placement" -}}
{{- $own := default (dict) .own -}}
{{- with merge (dict) (default (dict) $own.nodeSelector) .root.Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat .root.Values.tolerations (default (list) $own.tolerations) }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "hps.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "hps.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "hps.keysSecret" -}}
{{- default (printf "%s-keys" (include "hps.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}

{{- define "hps.scheme" -}}
{{- ternary "https" "http" .Values.tls.enabled -}}
{{- end -}}

{{/* The role that serves clients and runs the networks. */}}
{{- define "hps.way-in" -}}
{{- ternary "frontend" "lookup" .Values.frontend.enabled -}}
{{- end -}}

{{/* Prometheus job of the release: alerts recognise hps' jobs by `hps` in their names. */}}
{{- define "hps.job-name" -}}
{{- $name := include "hps.fullname" . -}}
{{- contains "hps" $name | ternary $name (printf "hps-%s" $name) -}}
{{- end -}}

{{/* Name of a service within the cluster. */}}
{{- define "hps.host" -}}
{{- printf "%s%s.%s.svc.%s" (include "hps.fullname" .root) .suffix .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{- define "hps.redis" -}}
{{- if .Values.dev.redis.enabled -}}
{{- list (printf "%s:6379" (include "hps.host" (dict "root" . "suffix" "-redis"))) | toJson -}}
{{- else -}}
{{- .Values.redis.addresses | toJson -}}
{{- end -}}
{{- end -}}

{{- define "hps.kafka" -}}
{{- if .Values.dev.kafka.enabled -}}
{{- printf "%s:9092" (include "hps.host" (dict "root" . "suffix" "-kafka")) -}}
{{- else -}}
{{- .Values.kafka.bootstrapServers -}}
{{- end -}}
{{- end -}}
